{{/*
Where the shards come from when they are streamed; empty when a directory on the volume is read. Input: $.
  {{ include "dataset-preprocess.source" . }}
*/}}
{{- define "dataset-preprocess.source" -}}
{{- with .Values.dataset }}
{{- if .stream -}}
{{- if .source }}{{ .source }}{{ else if .repo }}hf://datasets/{{ .repo }}{{ else -}}
{{- fail "\ndataset.stream is true and nothing says where the shards come from.\nAdd --set dataset.repo=ORG/NAME, or a file of values/datasets." }}
{{- end -}}
{{- if .inputPath }}
{{- fail (printf "\ndataset.stream is true and dataset.inputPath=%s names a directory to read.\nLeave one of them out." .inputPath) }}
{{- end -}}
{{- else if .sampleFiles -}}
{{- fail (printf "\ndataset.sampleFiles=%v chooses from a source that is streamed; dataset.stream is false.\nLeave it out, or add --set dataset.stream=true." .sampleFiles) }}
{{- end -}}
{{- end }}
{{- end }}

{{/*
What of a streamed source is wanted. Input: $. Output: YAML of options, none when nothing is streamed.
  {{ include "dataset-preprocess.choice" . | fromYaml }}
*/}}
{{- define "dataset-preprocess.choice" -}}
{{- with .Values.dataset }}
{{- if .stream }}
{{- dict "revision" .revision "include" .include "exclude" .exclude "split" .split "sample" .sampleFiles | toYaml }}
{{- end }}
{{- end }}
{{- end }}
