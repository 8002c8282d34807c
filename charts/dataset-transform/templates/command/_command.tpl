{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-transform.command" . | fromJson }}
*/}}
{{- define "dataset-transform.command" -}}
{{- include "dataset-transform.validate" . -}}
{{- $function := .Values.function -}}
{{- $arguments := list }}{{ range $name, $key := $function.arguments }}{{ $arguments = append $arguments (printf "%s=%s" $name $key) }}{{ end -}}
{{- $files := dict }}{{ with $function.source }}{{ $files = dict (printf "%s.py" (first (splitList ":" $function.name))) . }}{{ end -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "files" $files
      "importFiles" true
      "flags" (merge (include "dataset-transform.options" . | fromJson) (dict
        "revision" (ternary .Values.dataset.revision nil (eq true .Values.dataset.stream))
        "set" $arguments)) | toJson -}}
{{- end }}
