{{/*
Return the claim on an existing StorageClass or PersistentVolume. It outlives the release, with the data.
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
Check the section of this back end. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.existing.rules" . }}
*/}}
{{- define "shared-storage.existing.rules" -}}
{{- /* This back end has no rules. */}}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.existing.warnings" . }}
*/}}
{{- define "shared-storage.existing.warnings" -}}
{{- /* This back end has no warnings. */}}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.existing.properties" . | fromJson }}
*/}}
{{- define "shared-storage.existing.properties" -}}
{{ dict "noMountOptions" "the existing StorageClass or PersistentVolume contains them" | toJson }}
{{- end }}
