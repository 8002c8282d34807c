{{/*
Turn values into options of a command, sorted by name. No other helper builds a command line, and no shell reads it.
null: left out; true: --name; false: --no-name; a list: one option per item; a number: through toJson, because a plain
1000000 from a values file prints as 1e+06.
Input: dict of option (without dashes) to value. Output: a YAML list.
  {{ include "tokenmill.flags" (dict "sample" 100 "include" (list "a" "b")) }}
*/}}
{{- define "tokenmill.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $name }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ include "tokenmill.argument" (printf "--%s=%s" $name .) }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ include "tokenmill.argument" (printf "--%s=%s" $name $value) }}
{{- else }}
- {{ printf "--%s=%s" $name (toJson $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Quote one argument for YAML and for Kubernetes, which would replace $(NAME) with a variable such as a token.
Input: a string. Output: a YAML string.
  - {{ include "tokenmill.argument" "hf://datasets/ORG/NAME" }}
*/}}
{{- define "tokenmill.argument" -}}
{{ . | replace "$" "$$" | toJson }}
{{- end }}

{{/*
Return the directories that a stage reads and writes, relative to their volumes, as the values name them. One of them
may be empty: a stage with a source does not read a directory, and the other commands write below their input by
default. `dataset.root` is the default of the former's output and of the latter's input, so that one file of values fits
all stages.
Input: the stage's dict, see tokenmill.stage. Output: YAML of `reads` and `writes`.
  {{ $directories := include "tokenmill.directories" . | fromYaml }}
*/}}
{{- define "tokenmill.directories" -}}
{{- $dataset := .root.Values.dataset -}}
{{- if .source -}}
reads: ""
writes: {{ $dataset.outputPath | default $dataset.root | default "" | toJson }}
{{- else -}}
reads: {{ $dataset.inputPath | default $dataset.root | default "" | toJson }}
writes: {{ $dataset.outputPath | default "" | toJson }}
{{- end -}}
{{- end }}

{{/*
Return a directory as a path in the pod; the address of a bucket, and an empty one, unchanged. Input: list of the mount path
and the directory as the values name it. Output: a path, an address, or nothing.
  {{ include "tokenmill.place" (list "/data" "slimpajama") }}
*/}}
{{- define "tokenmill.place" -}}
{{- if and (last .) (not (contains "://" (last .))) }}{{ first . }}/{{ end }}{{ last . -}}
{{- end }}

{{/*
Return the same directories as paths in the pod, and `status`: the directory to pass to `tokenmill status` and `verify`.
Input: the stage's dict. Output: YAML of `reads`, `writes` and `status`.
  {{ $paths := include "tokenmill.paths" . | fromYaml }}
*/}}
{{- define "tokenmill.paths" -}}
{{- $storage := .root.Values.storage -}}
{{- $directories := include "tokenmill.directories" . | fromYaml -}}
{{- $output := ternary $storage.outputMountPath $storage.mountPath (not (empty $storage.outputPvcName)) -}}
{{- $reads := include "tokenmill.place" (list $storage.mountPath $directories.reads) -}}
{{- $writes := include "tokenmill.place" (list $output $directories.writes) -}}
reads: {{ toJson $reads }}
writes: {{ toJson $writes }}
status: {{ $writes | default $reads | toJson }}
{{- end }}

{{/*
Return all arguments of a stage: command, positional arguments, options.
Input: the stage's dict, see tokenmill.stage. Output: a YAML list.
  args: {{ include "tokenmill.arguments" . | nindent 2 }}
*/}}
{{- define "tokenmill.arguments" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $values := .root.Values -}}
- {{ .stage }}
{{- range compact (list .source $paths.reads $paths.writes) }}
- {{ include "tokenmill.argument" . }}
{{- end }}
{{- include "tokenmill.flags" (merge (dict
      "workers" $values.workers
      "replace" (ternary true nil $values.replace)
      "verify-hashes" (ternary true nil $values.verifyHashes)) .flags) }}
{{- end }}
