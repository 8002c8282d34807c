{{/*
Return the blend.json of several datasets, with paths in the pods; nothing without dataset.blend. Input: $, with "section" if
these values are a section of another chart. Output: JSON, or the render fails.
  {{ include "dataset-pack.blend" . }}
*/}}
{{- define "dataset-pack.blend" -}}
{{- $section := .section | default "" -}}
{{- $mount := .Values.storage.mountPath -}}
{{- $blend := dict -}}
{{- range $list, $datasets := .Values.dataset.blend -}}
{{- $entries := list -}}
{{- range $datasets -}}
{{- include "tokenmill.validatePath" (dict "key" (printf "%sdataset.blend.%s" $section $list) "path" .path "mount" $mount) -}}
{{- $entries = append $entries (merge (dict "path" (printf "%s/%s" $mount .path) "weight" (float64 (ternary 1 .weight (kindIs "invalid" .weight)))) (pick . "name")) -}}
{{- end -}}
{{- if $entries }}{{ $_ := set $blend (get (dict "all" "datasets" "validation" "valid") $list | default $list) $entries }}{{ end -}}
{{- end -}}
{{- if $blend -}}
{{- if .Values.dataset.inputPath }}
{{- fail (printf "\n%sdataset.blend names the datasets to read, but %sdataset.inputPath=%s names one, too.\nRemove one of them." $section $section .Values.dataset.inputPath) }}
{{- end }}
{{- if not .Values.dataset.outputPath }}
{{- fail (printf "\n%sdataset.blend needs a directory for the rows: %sdataset.outputPath is not set.\nAdd --set %sdataset.outputPath=DIRECTORY." $section $section $section) }}
{{- end -}}
{{ toJson $blend }}
{{- end -}}
{{- end }}
