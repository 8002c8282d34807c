{{/*
Return the command's arguments. Input: $. Output: JSON of flags, see tokenmill.stage.
  {{ include "dataset-extract.command" . | fromJson }}
*/}}
{{- define "dataset-extract.command" -}}
{{- dict "flags" (include "dataset-extract.options" . | fromJson) | toJson -}}
{{- end }}
