{{/*
Return the tokenizer: its name on the Hub, or its directory on the volume. Input: $. Output: a name or a path.
  {{ include "tokenmill.tokenizer" . }}
*/}}
{{- define "tokenmill.tokenizer" -}}
{{- with .Values.tokenizer }}{{ if .path }}{{ $.Values.storage.mountPath }}/{{ .path }}{{ else }}{{ .name }}{{ end }}{{ end -}}
{{- end }}

{{/*
Check that there is a tokenizer, and that a tokenizer's directory is inside the volume and is not combined with a revision
or a name. Input: $, with "section" if these values are a section of another chart. Output:
nothing, or the render fails.
  {{ include "tokenmill.validateTokenizer" . }}
*/}}
{{- define "tokenmill.validateTokenizer" -}}
{{- $section := .section | default "" -}}
{{- with .Values.tokenizer }}
{{- include "tokenmill.validatePath" (dict "key" (print $section "tokenizer.path") "path" .path "mount" $.Values.storage.mountPath) }}
{{- if not (or .path .name) }}
{{- fail (printf "\n%stokenizer.name is not set: the stage needs the tokenizer of the model to train.\nAdd --set %stokenizer.name=ORG/NAME, or --set %stokenizer.path=DIRECTORY for a directory on the volume." $section $section $section) }}
{{- end }}
{{- if and .path .revision }}
{{- fail (printf "\n%stokenizer.revision=%v selects a revision on the Hub, but %stokenizer.path=%s names a directory.\nRemove one of them." $section .revision $section .path) }}
{{- end }}
{{- if and .path .name }}
{{- fail (printf "\n%stokenizer.name=%s names a tokenizer on the Hub, but %stokenizer.path=%s names a directory.\nRemove one of them. If an earlier revision or a file sets it, set it to null." $section .name $section .path) }}
{{- end }}
{{- end }}
{{- end }}
