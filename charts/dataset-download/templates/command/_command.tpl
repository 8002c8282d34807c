{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-download.command" . | fromJson }}
*/}}
{{- define "dataset-download.command" -}}
{{- include "dataset-download.validate" . -}}
{{- dict
      "source" (.Values.dataset.source | default (printf "hf://datasets/%s" .Values.dataset.repo))
      "flags" (include "dataset-download.options" . | fromJson) | toJson -}}
{{- end }}
