{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-pack.command" . | fromJson }}
*/}}
{{- define "dataset-pack.command" -}}
{{- $blend := include "dataset-pack.blend" . -}}
{{- dict
      "source" (ternary (printf "%s/blend.json" (include "tokenmill.filesPath" .)) "" (not (empty $blend)))
      "files" (ternary (dict "blend.json" $blend) dict (not (empty $blend)))
      "flags" (include "dataset-pack.options" . | fromJson) | toJson -}}
{{- end }}
