{{/*
The tokenizer: its name on the Hub, or its directory on the volume. Input: $. Output: a name or a path.
  {{ include "dataset-preprocess.tokenizer" . }}
*/}}
{{- define "dataset-preprocess.tokenizer" -}}
{{- with .Values.tokenizer }}{{ if .path }}{{ $.Values.storage.mountPath }}/{{ .path }}{{ else }}{{ .name }}{{ end }}{{ end -}}
{{- end }}

{{/*
A tokenizer's directory stays on the volume, has no revision, and no name beside it but the one that is there unasked. Input: $. Output: nothing, or the render fails.
  {{ include "dataset-preprocess.validate" . }}
*/}}
{{- define "dataset-preprocess.validate" -}}
{{- with .Values.tokenizer }}
{{- include "tokenmill.validatePath" (dict "key" "tokenizer.path" "path" .path "mount" $.Values.storage.mountPath) }}
{{- if and .path .revision }}
{{- fail (printf "\ntokenizer.revision=%v is for a tokenizer on the Hub, and tokenizer.path=%s names a directory.\nLeave one of them out." .revision .path) }}
{{- end }}
{{- if and .path .name (ne .name "openai-community/gpt2") }}
{{- fail (printf "\ntokenizer.name=%s is a tokenizer on the Hub, and tokenizer.path=%s names a directory.\nLeave one of them out; where an earlier revision or a file sets it, set it to null." .name .path) }}
{{- end }}
{{- end }}
{{- end }}
