{{/*
How much is to be fetched is said by two keys, which must agree. Input: $. Output: nothing, or the render fails.
  {{ include "dataset-download.validate" . }}
*/}}
{{- define "dataset-download.validate" -}}
{{- $full := .Values.dataset.fullDataset -}}
{{- $sample := .Values.dataset.sampleFiles -}}
{{- if and (eq (toJson $full) "true") (not (kindIs "invalid" $sample)) }}
{{- fail (printf "\ndataset.fullDataset=true and dataset.sampleFiles=%s contradict each other: all files, or a sample?\nLeave one of them out." (toJson $sample)) }}
{{- end }}
{{- if and (eq (toJson $full) "false") (kindIs "invalid" $sample) }}
{{- fail "\ndataset.fullDataset=false does not say how many files to fetch.\nAdd --set dataset.sampleFiles=N." }}
{{- end }}
{{- end }}
