{{/*
Return the command's arguments. Input: $. Output: JSON of flags, see tokenmill.stage.
  {{ include "dataset-concatenate.command" . | fromJson }}
*/}}
{{- define "dataset-concatenate.command" -}}
{{- dict "flags" (include "dataset-concatenate.options" . | fromJson) | toJson -}}
{{- end }}
