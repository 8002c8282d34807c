{{/*
Return all objects of a stage: its Job, the hooks that delete the Job on an upgrade, the files of its values, its service
account, its network policies and its test.
Input: a dict of
  root    the chart's context, $
  stage   the command, a name of stages/registry.py
  source  the URI of the corpus, for download and for a stage that streams; or a file of the pods to read
  flags   the stage's own options: dict of option to value
  files   files that the pods need, from the values: dict of name to text; importFiles: true if they are Python modules
Output: documents.
  {{ include "tokenmill.stage" (dict "root" . "stage" "extract" "flags" (dict "from" .Values.dataset.fromStage)) }}
*/}}
{{- define "tokenmill.stage" -}}
{{- include "tokenmill.validate" . -}}
{{- include "tokenmill.serviceAccount" .root }}
{{- include "tokenmill.notifyRole" (dict "root" .root "group" "batch" "resource" "jobs" "name" (include "tokenmill.jobName" .)) }}
{{- include "tokenmill.stagePolicies" . }}
{{- include "tokenmill.files" . }}
{{- include "tokenmill.workload" (dict "root" .root "apiVersion" "batch/v1" "kind" "Job"
      "name" (include "tokenmill.jobName" .)
      "hash" (include "tokenmill.jobHash" .)
      "spec" (include "tokenmill.fullJobSpec" (merge (dict "empty" false) .))
      "empty" (include "tokenmill.fullJobSpec" (merge (dict "empty" true) .))
      "annotations" (ternary "" (printf "kueue.x-k8s.io/job-min-parallelism: %q" (toJson .root.Values.kueue.minWorkers)) (kindIs "invalid" .root.Values.kueue.minWorkers))
      "neverClear" (ne .root.Values.job.naming "release")
      "onRollback" .root.Values.job.onRollback) }}
{{- include "tokenmill.test" . }}
{{ end }}
