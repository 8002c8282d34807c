{{/*
What in the mount options does harm, whoever wrote them: the back end's own warnings, then what holds for all. Input: $.
Output: lines that begin with Mind, or none.
  {{ include "shared-storage.warnings" . }}
*/}}
{{- define "shared-storage.warnings" -}}
{{- include (printf "shared-storage.%s.warnings" .Values.backend) . }}
{{- with include "shared-storage.otherOptions" . }}
{{ . }}
{{- end }}
{{- end }}

{{/*
What Lustre's mount options do, of whichever provider. Input: $. Output: a line, or none.
  {{ include "shared-storage.lustreWarnings" . }}
*/}}
{{- define "shared-storage.lustreWarnings" -}}
{{- $raw := .Values.storage.mountOptions -}}
{{- if and $raw (not (has "flock" $raw)) }}
Mind: without the mount option flock, locks of files fail, which libraries take when they load models and data sets. Add flock.
{{- end }}
{{- end }}

{{/*
A volume keeps the mount options it was made with. Only who made a StorageClass may look at it. Input: $. Output: a line, or
nothing.
  {{ include "shared-storage.otherOptions" . }}
*/}}
{{- define "shared-storage.otherOptions" -}}
{{- if and (include "shared-storage.about" . | fromJson).driver (include "shared-storage.stays" .) }}
{{- $options := (lookup "storage.k8s.io/v1" "StorageClass" "" (include "shared-storage.className" .)).mountOptions }}
{{- $volume := ((lookup "v1" "PersistentVolumeClaim" .Release.Namespace .Values.pvc.name).spec).volumeName }}
{{- $has := ((lookup "v1" "PersistentVolume" "" ($volume | default "-")).spec).mountOptions }}
{{- if and $volume (ne (toJson $has) (toJson $options)) }}
Mind: the volume {{ $volume }} keeps the mount options it was made with. To change them: kubectl patch pv {{ $volume }} --type=merge -p '{"spec":{"mountOptions":{{ toJson $options }}}}', then start its pods again.
{{- end }}
{{- end }}
{{- end }}
