{{/*
Check that the text of a module has a module's name, and that the output files have one kind of size. Input: $, with
"section" if these values are a section of another chart. Output: nothing, or the render fails.
  {{ include "dataset-transform.validate" . }}
*/}}
{{- define "dataset-transform.validate" -}}
{{- $section := .section | default "" -}}
{{- with .Values.function }}
{{- if and .source (not (regexMatch "^[A-Za-z_][A-Za-z0-9_]*:[A-Za-z_]" .name)) }}
{{- fail (printf "\n%sfunction.source contains a module, but %sfunction.name=%s does not name a function of it.\nSet %sfunction.name=MODULE:FUNCTION; MODULE is the name of the file without .py and without dots." $section $section .name $section) }}
{{- end }}
{{- if and .arguments (contains ":" .name) }}
{{- fail (printf "\n%sfunction.arguments are for built-in transforms, but %sfunction.name=%s names a function of yours.\nRemove the arguments." $section $section .name) }}
{{- end }}
{{- end }}
{{- with .Values.shards }}
{{- if and .size .number }}
{{- fail (printf "\n%sshards.size=%s and %sshards.number=%v exclude each other: the number determines the size.\nRemove one of them." $section .size $section .number) }}
{{- end }}
{{- end }}
{{- end }}
