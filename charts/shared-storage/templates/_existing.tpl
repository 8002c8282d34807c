{{/*
A StorageClass or a PersistentVolume that is in the cluster. The claim stays when the release goes, and the data with it.
Input: $. Output: a document.
  {{ include "shared-storage.existing" . }}
*/}}
{{- define "shared-storage.existing" -}}
{{- $existing := .Values.existing -}}
{{- $class := ternary $existing.storageClassName nil (not (empty $existing.storageClassName)) -}}
{{- if $existing.volumeName }}{{ $class = $existing.storageClassName }}{{ end -}}
{{ include "shared-storage.claim" (dict "root" . "size" (.Values.pvc.size | default "100Gi" | toString) "storageClassName" $class
      "volumeName" $existing.volumeName "keep" true "grows" (empty $existing.volumeName)) }}
{{- end }}
