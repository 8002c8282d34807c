{{/*
How much is to be fetched is said by two keys, which must agree. Input: $, with "section" where
these values are a section of a chart's. Output: nothing, or the render fails.
  {{ include "dataset-download.validate" . }}
*/}}
{{- define "dataset-download.validate" -}}
{{- $in := .section | default "" -}}
{{- $full := .Values.dataset.fullDataset -}}
{{- $sample := .Values.dataset.sampleFiles -}}
{{- if and (eq (toJson $full) "true") (not (kindIs "invalid" $sample)) }}
{{- fail (printf "\n%sdataset.fullDataset=true and %sdataset.sampleFiles=%s contradict each other: all files, or a sample?\nLeave one of them out." $in $in (toJson $sample)) }}
{{- end }}
{{- if and (eq (toJson $full) "false") (kindIs "invalid" $sample) }}
{{- fail (printf "\n%sdataset.fullDataset=false does not say how many files to fetch.\nAdd --set %sdataset.sampleFiles=N." $in $in) }}
{{- end }}
{{- end }}
