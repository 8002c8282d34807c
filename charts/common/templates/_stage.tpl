{{/*
All objects of a stage: its Job, what clears the Job on an upgrade, its service account, its network policies, its test.
Input: a dict of
  root    the chart's context, $
  stage   the command, a name of stages/registry.py
  source  where the corpus comes from, an URI; for download, and for a preprocess that streams
  flags   the stage's own options: dict of option to value
Output: documents.
  {{ include "tokenmill.stage" (dict "root" . "stage" "extract" "flags" (dict "from" .Values.dataset.fromStage)) }}
*/}}
{{- define "tokenmill.stage" -}}
{{- include "tokenmill.validate" . -}}
{{- include "tokenmill.serviceAccount" .root }}
{{- include "tokenmill.stagePolicies" . }}
{{- include "tokenmill.workload" (dict "root" .root "apiVersion" "batch/v1" "kind" "Job"
      "name" (include "tokenmill.jobName" .)
      "hash" (include "tokenmill.jobHash" .)
      "spec" (include "tokenmill.jobWhole" (merge (dict "clear" false) .))
      "empty" (include "tokenmill.jobWhole" (merge (dict "clear" true) .))
      "kept" (ne .root.Values.job.naming "release")
      "onRollback" .root.Values.job.onRollback) }}
{{- include "tokenmill.test" . }}
{{ end }}
