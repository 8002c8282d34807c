{{/*
All objects of a stage: its Job, what clears the Job on an upgrade, its service account, its test.
Input: a dict of
  root    the chart's context, $
  stage   the command: download, extract, concatenate or preprocess
  source  where the corpus comes from, an URI; for download, and for a preprocess that streams
  flags   the stage's own options: dict of option to value
Output: documents.
  {{ include "tokenmill.stage" (dict "root" . "stage" "extract" "flags" (dict "from" .Values.dataset.fromStage)) }}
*/}}
{{- define "tokenmill.stage" -}}
{{- include "tokenmill.validate" . -}}
{{- include "tokenmill.serviceAccount" .root }}
{{- include "tokenmill.job" (merge (dict "hooks" "") .) }}
{{- $hooks := include "tokenmill.clearingHooks" . }}
{{- if contains "pre-upgrade" $hooks }}
{{- /* Under another name first: what the API server refuses must not cost the Job that runs. */}}
{{- $name := printf "%s-trial-%s" (include "tokenmill.name" . | trunc 40) (include "tokenmill.jobHash" .) }}
{{- include "tokenmill.job" (merge (dict "hooks" "pre-upgrade" "weight" -1 "name" $name) .) }}
{{- end }}
{{- if $hooks }}{{ include "tokenmill.job" (merge (dict "hooks" $hooks) .) }}{{ end }}
{{- include "tokenmill.test" . }}
{{ end }}
