{{/*
Return the source of the corpus, or fail if the values name none. Input: $.
  {{ include "tokenmill.corpusSource" . }}
*/}}
{{- define "tokenmill.corpusSource" -}}
{{- with .Values.dataset }}
{{- if .source }}{{ .source }}{{ else if .repo }}hf://datasets/{{ .repo }}{{ else -}}
{{- fail "\ndataset.repo is not set: the stage needs the corpus to download.\nAdd --set dataset.repo=ORG/NAME, --set dataset.source=ADDRESS for a bucket or the web, or -f with a file of values/datasets." }}
{{- end -}}
{{- end }}
{{- end }}

{{/*
Return the source of streamed shards; empty when the stage reads a directory on the volume. Input: $, with "section" if
these values are a section of another chart.
  {{ include "tokenmill.streamedSource" . }}
*/}}
{{- define "tokenmill.streamedSource" -}}
{{- $section := .section | default "" -}}
{{- with .Values.dataset }}
{{- if .stream -}}
{{- if .source }}{{ .source }}{{ else if .repo }}hf://datasets/{{ .repo }}{{ else -}}
{{- fail (printf "\n%sdataset.stream=true needs a source of shards.\nAdd --set dataset.repo=ORG/NAME, or -f with a file of values/datasets." $section) }}
{{- end -}}
{{- if .inputPath }}
{{- fail (printf "\n%sdataset.stream=true reads a source, but %sdataset.inputPath=%s names a directory to read.\nRemove one of them." $section $section .inputPath) }}
{{- end -}}
{{- else if .sampleFiles -}}
{{- fail (printf "\n%sdataset.sampleFiles=%v selects shards of a streamed source, but %sdataset.stream is false.\nRemove it, or add --set %sdataset.stream=true." $section .sampleFiles $section $section) }}
{{- end -}}
{{- end }}
{{- end }}
