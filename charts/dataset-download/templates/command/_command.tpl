{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-download.command" . | fromJson }}
*/}}
{{- define "dataset-download.command" -}}
{{- include "dataset-download.validate" . -}}
{{- dict
      "source" (include "tokenmill.corpusSource" .)
      "flags" (include "dataset-download.options" . | fromJson) | toJson -}}
{{- end }}
