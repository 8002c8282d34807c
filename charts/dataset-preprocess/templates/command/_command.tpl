{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-preprocess.command" . | fromJson }}
*/}}
{{- define "dataset-preprocess.command" -}}
{{- include "tokenmill.validateTokenizer" . -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "flags" (merge (include "dataset-preprocess.options" . | fromJson) (dict
        "revision" (ternary .Values.dataset.revision nil (eq true .Values.dataset.stream))
        "keys" (join "," .Values.dataset.keys)
        "tokenizer" (include "tokenmill.tokenizer" .))) | toJson -}}
{{- end }}
