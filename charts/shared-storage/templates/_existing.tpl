{{/*
A StorageClass or a PersistentVolume that is in the cluster. The claim stays when the release goes, and the data with it.
Input: $. Output: a document.
  {{ include "shared-storage.existing.volume" . }}
*/}}
{{- define "shared-storage.existing.volume" -}}
{{- $existing := .Values.existing -}}
{{- $class := ternary $existing.storageClassName nil (not (empty $existing.storageClassName)) -}}
{{- if $existing.volumeName }}{{ $class = $existing.storageClassName }}{{ end -}}
{{ include "shared-storage.claim" (dict "root" . "size" (.Values.pvc.size | default "100Gi" | toString) "storageClassName" $class
      "volumeName" $existing.volumeName "keep" true "grows" (empty $existing.volumeName)) }}
{{- end }}

{{/*
Its rules. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.existing.rules" . }}
*/}}
{{- define "shared-storage.existing.rules" -}}
{{- /* None. */}}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.existing.warnings" . }}
*/}}
{{- define "shared-storage.existing.warnings" -}}
{{- /* None. */}}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.existing.about" . | fromJson }}
*/}}
{{- define "shared-storage.existing.about" -}}
{{ dict "noMountOptions" "they stand in the StorageClass or the PersistentVolume that is there" | toJson }}
{{- end }}
