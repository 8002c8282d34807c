{{/*
The part of the Job's spec that cannot be changed in place: what it runs, and how failures count. No backoffLimit, which
would end the Job before the limit of an index does.
Input: the stage's dict, see tokenmill.stage. Output: YAML.
  {{ include "tokenmill.jobSpec" . | nindent 2 }}
*/}}
{{- define "tokenmill.jobSpec" -}}
{{- $job := .root.Values.job -}}
completionMode: Indexed
backoffLimitPerIndex: {{ toJson $job.backoffLimitPerIndex }}
# A successor starts once its predecessor is gone, so that no index is done by two pods at a time.
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    - action: Ignore  # an eviction or a drain is nobody's fault
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailIndex  # exit code 2: no retry can help
      onExitCodes: {containerName: {{ .stage }}, operator: In, values: [2]}
template:
  metadata:
    labels: {{- include "tokenmill.podLabels" . | nindent 6 }}
    {{- with .root.Values.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- $environment := "- {name: TOKENMILL_RUN, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['batch.kubernetes.io/controller-uid']\"}}}" }}
  {{- $pod := dict "arguments" (include "tokenmill.arguments" .) "environment" $environment }}
  spec: {{- include "tokenmill.podSpec" (merge $pod .) | nindent 4 }}
{{- end }}

{{/*
Hash of that part, of what asks for another run, and of Kueue's queue: another hash needs another Job.
Input: the stage's dict. Output: hex digits.
  {{ include "tokenmill.jobHash" . }}
*/}}
{{- define "tokenmill.jobHash" -}}
{{- $more := list (toString .root.Values.job.runAgain) (.root.Values.kueue.queueName | default "") -}}
{{- list (include "tokenmill.jobSpec" . | fromYaml) $more | toJson | sha256sum | trunc 16 -}}
{{- end }}

{{/*
The name of the Job: fixed, or with the hash in it for tools that apply rendered files (`job.naming: hash`).
Input: the stage's dict. Output: a name.
  {{ include "tokenmill.jobName" . }}
*/}}
{{- define "tokenmill.jobName" -}}
{{- include "tokenmill.name" . -}}
{{- if eq .root.Values.job.naming "hash" }}-{{ include "tokenmill.jobHash" . | trunc 8 }}{{ end -}}
{{- end }}

{{/*
A Job, or the empty one that clears its place: a Job's template cannot change, so an upgrade with other values must
delete it first. Helm deletes a hook of the same kind and name before it creates the hook, the empty Job completes
without a pod and is deleted, and Helm creates the real one.
Input: the stage's dict, and "hooks": empty for the Job itself, else the hooks at which it is cleared; "weight" and
"name" of the hook where they are not 0 and the Job's. Output: a document.
  {{ include "tokenmill.job" (merge (dict "hooks" "pre-upgrade") .) }}
*/}}
{{- define "tokenmill.job" -}}
{{- $job := .root.Values.job -}}
{{- $workers := ternary 0 .root.Values.workers (not (empty .hooks)) }}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .name | default (include "tokenmill.jobName" .) | quote }}
  labels:
    {{- include "tokenmill.labels" .root | nindent 4 }}
    {{- if and .root.Values.kueue.queueName (not .hooks) }}
    kueue.x-k8s.io/queue-name: {{ .root.Values.kueue.queueName | quote }}
    {{- end }}
  annotations:
    {{- if .hooks }}
    helm.sh/hook: {{ .hooks }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    helm.sh/hook-weight: {{ .weight | default 0 | quote }}
    {{- else }}
    tokenmill/spec: {{ include "tokenmill.jobHash" . | quote }}
    {{- end }}
spec:
  completions: {{ toJson $workers }}
  parallelism: {{ toJson $workers }}
  {{- range $key := list "maxFailedIndexes" "activeDeadlineSeconds" "ttlSecondsAfterFinished" }}
  {{- $value := index $job $key }}
  {{- if not (or $.hooks (kindIs "invalid" $value)) }}
  {{ $key }}: {{ toJson $value }}
  {{- end }}
  {{- end }}
  {{- include "tokenmill.jobSpec" . | nindent 2 }}
{{- end }}

{{/*
The hooks at which the Job must be cleared: an upgrade that finds a Job of another hash, or a failed one; and every
rollback, because what it finds then cannot be known now. None where nothing is connected, so that `helm template` gives
the same bytes anywhere. Input: the stage's dict. Output: hooks, comma-separated.
  {{ include "tokenmill.clearingHooks" . }}
*/}}
{{- define "tokenmill.clearingHooks" -}}
{{- $hooks := list -}}
{{- if and (eq .root.Values.job.naming "release") (eq (include "tokenmill.connected" .root) "true") -}}
{{- $job := lookup "batch/v1" "Job" .root.Release.Namespace (include "tokenmill.jobName" .) -}}
{{- if $job -}}
{{- $annotations := $job.metadata.annotations | default dict -}}
{{- $changed := ne (index $annotations "tokenmill/spec") (include "tokenmill.jobHash" .) -}}
{{- $failed := false -}}
{{- range ($job.status).conditions }}{{ if and (eq .type "Failed") (eq .status "True") }}{{ $failed = true }}{{ end }}{{ end -}}
{{- if or $changed $failed }}{{ $hooks = append $hooks "pre-upgrade" }}{{ end -}}
{{- end -}}
{{- $hooks = append $hooks "pre-rollback" -}}
{{- end -}}
{{- join "," $hooks -}}
{{- end }}

{{/*
Whether this render can see the cluster: every namespace has this ConfigMap. Input: $. Output: true or nothing.
  {{ if eq (include "tokenmill.connected" .) "true" }}
*/}}
{{- define "tokenmill.connected" -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" }}true{{ end -}}
{{- end }}
