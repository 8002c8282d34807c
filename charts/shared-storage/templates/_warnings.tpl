{{/*
Return warnings about harmful mount options, from the values or the chart: those of the back end, then those for all back
ends. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.warnings" . }}
*/}}
{{- define "shared-storage.warnings" -}}
{{- include (printf "shared-storage.%s.warnings" .Values.backend) . }}
{{- with include "shared-storage.mountOptionsWarning" . }}
{{ . }}
{{- end }}
{{- end }}

{{/*
Return a warning about Lustre's mount options, for every provider. Input: $. Output: a line, or nothing.
  {{ include "shared-storage.lustreWarnings" . }}
*/}}
{{- define "shared-storage.lustreWarnings" -}}
{{- $mountOptions := .Values.storage.mountOptions -}}
{{- if and $mountOptions (not (has "flock" $mountOptions)) }}
Warning: without the mount option flock, file locks fail, which libraries need to load models and datasets. Add flock.
{{- end }}
{{- end }}

{{/*
Return a warning if the values change mount options: a volume keeps those it was created with. The look-up of the
StorageClass is limited to back ends that create one, because other users may lack the right to read it.
Input: $. Output: a line, or nothing.
  {{ include "shared-storage.mountOptionsWarning" . }}
*/}}
{{- define "shared-storage.mountOptionsWarning" -}}
{{- if and (include "shared-storage.properties" . | fromJson).driver (include "shared-storage.claimIsKept" .) }}
{{- $options := (lookup "storage.k8s.io/v1" "StorageClass" "" (include "shared-storage.className" .)).mountOptions }}
{{- $volume := ((lookup "v1" "PersistentVolumeClaim" .Release.Namespace .Values.pvc.name).spec).volumeName }}
{{- $volumeOptions := ((lookup "v1" "PersistentVolume" "" ($volume | default "-")).spec).mountOptions }}
{{- if and $volume (ne (toJson $volumeOptions) (toJson $options)) }}
Warning: the volume {{ $volume }} keeps the mount options it was created with. To change them: kubectl patch pv {{ $volume }} --type=merge -p '{"spec":{"mountOptions":{{ toJson $options }}}}', then restart its pods.
{{- end }}
{{- end }}
{{- end }}
