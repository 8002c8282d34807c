{{/*
Turn values into options of a command, sorted by name; nothing else in these charts builds a command line, and no shell
ever reads one. null: left out; true: --name; false: --no-name; a list: once for each item; a number: through toJson,
since a plain 1000000 from a values file prints as 1e+06.
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
Quote one argument for YAML, and for Kubernetes, which would replace $(NAME) in it by a variable, a token's for example.
Input: a string. Output: a YAML string.
  - {{ include "tokenmill.argument" "hf://datasets/ORG/NAME" }}
*/}}
{{- define "tokenmill.argument" -}}
{{ . | replace "$" "$$" | toJson }}
{{- end }}

{{/*
Options that say which files a stage takes: of a source, of a directory, or of what an earlier stage made.
Input: $. Output: YAML of options.
  {{ include "tokenmill.selection" . | fromYaml }}
*/}}
{{- define "tokenmill.selection" -}}
{{- with .Values.dataset }}
{{- dict "include" .include "exclude" .exclude "split" .split "sample" .sampleFiles "prefer" .prefer | toYaml }}
{{- end }}
{{- end }}

{{/*
The directories that a stage reads and writes, relative to their volumes, as the values name them; empty where they do
not: a stage with a source reads none, and the others' commands have a default below what they read. `dataset.root`
stands in for the former's output and the latter's input, so that one file of values serves all stages.
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
The same directories as the pod sees them, and `about`, where the stage's records are found.
Input: the stage's dict. Output: YAML of `reads`, `writes` and `about`.
  {{ $paths := include "tokenmill.paths" . | fromYaml }}
*/}}
{{- define "tokenmill.paths" -}}
{{- $storage := .root.Values.storage -}}
{{- $found := include "tokenmill.directories" . | fromYaml -}}
{{- $output := ternary $storage.outputMountPath $storage.mountPath (not (empty $storage.outputPvcName)) -}}
{{- $reads := "" }}{{ with $found.reads }}{{ $reads = printf "%s/%s" $storage.mountPath . }}{{ end -}}
{{- $writes := "" }}{{ with $found.writes }}{{ $writes = printf "%s/%s" $output . }}{{ end -}}
reads: {{ toJson $reads }}
writes: {{ toJson $writes }}
about: {{ $writes | default $reads | toJson }}
{{- end }}

{{/*
The whole argument list of a stage: command, positional arguments, options.
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
