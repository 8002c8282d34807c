{{/*
Check that the two keys for the number of files agree. Input: $, with "section" if these values are a section of another
chart. Output: nothing, or the render fails.
  {{ include "dataset-download.validate" . }}
*/}}
{{- define "dataset-download.validate" -}}
{{- $section := .section | default "" -}}
{{- $full := .Values.dataset.fullDataset -}}
{{- $sample := .Values.dataset.sampleFiles -}}
{{- if and (eq (toJson $full) "true") (not (kindIs "invalid" $sample)) }}
{{- fail (printf "\n%sdataset.fullDataset=true and %sdataset.sampleFiles=%s contradict each other: one selects all files, the other a sample.\nRemove one of them." $section $section (toJson $sample)) }}
{{- end }}
{{- if and (eq (toJson $full) "false") (kindIs "invalid" $sample) }}
{{- fail (printf "\n%sdataset.fullDataset=false needs the number of files to download.\nAdd --set %sdataset.sampleFiles=N." $section $section) }}
{{- end }}
{{- end }}
