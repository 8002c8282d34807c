{{/*
The tokenizer: its name on the Hub, or its directory on the volume. Input: $. Output: a name or a path.
  {{ include "dataset-preprocess.tokenizer" . }}
*/}}
{{- define "dataset-preprocess.tokenizer" -}}
{{- with .Values.tokenizer }}{{ if .path }}{{ $.Values.storage.mountPath }}/{{ .path }}{{ else }}{{ .name }}{{ end }}{{ end -}}
{{- end }}

{{/*
A tokenizer's directory stays on the volume, has no revision, and no name beside it but the one that is there unasked.
Input: $, with "section" where these values are a section of a chart's. Output: nothing, or the render fails.
  {{ include "dataset-preprocess.validate" . }}
*/}}
{{- define "dataset-preprocess.validate" -}}
{{- $in := .section | default "" -}}
{{- with .Values.tokenizer }}
{{- include "tokenmill.validatePath" (dict "key" (print $in "tokenizer.path") "path" .path "mount" $.Values.storage.mountPath) }}
{{- if and .path .revision }}
{{- fail (printf "\n%stokenizer.revision=%v is for a tokenizer on the Hub, and %stokenizer.path=%s names a directory.\nLeave one of them out." $in .revision $in .path) }}
{{- end }}
{{- if and .path .name (ne .name "openai-community/gpt2") }}
{{- fail (printf "\n%stokenizer.name=%s is a tokenizer on the Hub, and %stokenizer.path=%s names a directory.\nLeave one of them out; where an earlier revision or a file sets it, set it to null." $in .name $in .path) }}
{{- end }}
{{- end }}
{{- end }}
