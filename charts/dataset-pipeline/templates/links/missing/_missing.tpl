{{/*
What stands for a stage's own templates where they are missing: this chart reaches them by symbolic links in Git, and a
package has them as files. Helm reads templates that lie deeper first, so that the stages' own replace these.
Input: $. Output: none, the render fails.
  {{ include "dataset-pipeline.missing" "download" }}
*/}}
{{- define "dataset-pipeline.missing" -}}
{{- include "tokenmill.missing" (printf "templates/%s" .) -}}
{{- end }}
{{- define "dataset-download.command" }}{{ include "dataset-pipeline.missing" "download" }}{{ end }}
{{- define "dataset-extract.command" }}{{ include "dataset-pipeline.missing" "extract" }}{{ end }}
{{- define "dataset-concatenate.command" }}{{ include "dataset-pipeline.missing" "concatenate" }}{{ end }}
{{- define "dataset-preprocess.command" }}{{ include "dataset-pipeline.missing" "preprocess" }}{{ end }}
