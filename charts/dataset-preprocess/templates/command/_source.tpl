{{/*
Where the shards come from when they are streamed; empty when a directory on the volume is read. Input: $, with
"section" where these values are a section of a chart's.
  {{ include "dataset-preprocess.source" . }}
*/}}
{{- define "dataset-preprocess.source" -}}
{{- $in := .section | default "" -}}
{{- with .Values.dataset }}
{{- if .stream -}}
{{- if .source }}{{ .source }}{{ else if .repo }}hf://datasets/{{ .repo }}{{ else -}}
{{- fail (printf "\n%sdataset.stream is true and nothing says where the shards come from.\nAdd --set dataset.repo=ORG/NAME, or a file of values/datasets." $in) }}
{{- end -}}
{{- if .inputPath }}
{{- fail (printf "\n%sdataset.stream is true and %sdataset.inputPath=%s names a directory to read.\nLeave one of them out." $in $in .inputPath) }}
{{- end -}}
{{- else if .sampleFiles -}}
{{- fail (printf "\n%sdataset.sampleFiles=%v chooses from a source that is streamed; %sdataset.stream is false.\nLeave it out, or add --set %sdataset.stream=true." $in .sampleFiles $in $in) }}
{{- end -}}
{{- end }}
{{- end }}
