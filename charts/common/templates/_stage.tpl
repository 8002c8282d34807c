{{/*
Return all objects of a stage: its Job, the hooks that delete the Job on an upgrade, its service account, its network
policies and its test.
Input: a dict of
  root    the chart's context, $
  stage   the command, a name of stages/registry.py
  source  the URI of the corpus; for download, and for a preprocess that streams
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
      "spec" (include "tokenmill.fullJobSpec" (merge (dict "empty" false) .))
      "empty" (include "tokenmill.fullJobSpec" (merge (dict "empty" true) .))
      "neverClear" (ne .root.Values.job.naming "release")
      "onRollback" .root.Values.job.onRollback) }}
{{- include "tokenmill.test" . }}
{{ end }}
