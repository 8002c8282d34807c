{{/*
All objects of a stage: its Job, what clears the Job on an upgrade, its service account, its test.
Input: a dict of
  root    the chart's context, $
  stage   the command: download, extract, concatenate or preprocess
  source  where the corpus comes from, an URI; for download alone
  flags   the stage's own options: dict of option to value
Output: documents.
  {{ include "tokenmill.stage" (dict "root" . "stage" "extract" "flags" (dict "from" .Values.dataset.fromStage)) }}
*/}}
{{- define "tokenmill.stage" -}}
{{- include "tokenmill.validate" . -}}
{{- include "tokenmill.serviceAccount" .root }}
{{- include "tokenmill.job" (merge (dict "hooks" "") .) }}
{{- with include "tokenmill.clearingHooks" . }}{{ include "tokenmill.job" (merge (dict "hooks" .) $) }}{{ end }}
{{- include "tokenmill.test" . }}
{{ end }}
