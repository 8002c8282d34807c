{{/*
Return the immutable part of the Job's spec: its pods, and the handling of failures. It has no backoffLimit, which would
end the Job before an index reaches its own limit.
Input: the stage's dict, see tokenmill.stage. Output: YAML.
  {{ include "tokenmill.jobSpec" . | nindent 2 }}
*/}}
{{- define "tokenmill.jobSpec" -}}
{{- $job := .root.Values.job -}}
completionMode: Indexed
backoffLimitPerIndex: {{ toJson $job.backoffLimitPerIndex }}
# A replacement starts when the failed pod is gone, so that two pods never process the same index.
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    - action: Ignore  # an eviction or a drain is not a failure of the pod
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailIndex  # exit code 2: a retry cannot help
      onExitCodes: {containerName: {{ .stage }}, operator: In, values: [2]}
    - action: Ignore  # exit code 143: SIGTERM stopped the pod; in the first minute a pod exits with 1 instead
      onExitCodes: {containerName: {{ .stage }}, operator: In, values: [143]}
template:
  metadata:
    labels: {{- include "tokenmill.podLabels" . | nindent 6 }}
    {{- with include "tokenmill.podAnnotations" .root }}
    annotations: {{- . | nindent 6 }}
    {{- end }}
  {{- $environment := "- {name: TOKENMILL_RUN, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['batch.kubernetes.io/controller-uid']\"}}}\n- {name: TOKENMILL_EARLY_STOP_SECONDS, value: \"60\"}" }}
  {{- $pod := dict "arguments" (include "tokenmill.arguments" .) }}
  {{- if .files }}
  {{- $_ := set $pod "mounts" (printf "- {name: files, mountPath: %s, readOnly: true}" (include "tokenmill.filesPath" .)) }}
  {{- $_ := set $pod "volumes" (printf "- name: files\n  configMap: {name: %q}" (include "tokenmill.filesName" .)) }}
  {{- if .importFiles }}{{ $environment = printf "%s\n- {name: PYTHONPATH, value: %s}" $environment (include "tokenmill.filesPath" .) }}{{ end }}
  {{- end }}
  {{- $environment = printf "%s%s%s" $environment (include "tokenmill.metricsEnvironment" .root) (include "tokenmill.stageNotifyEnvironment" .) }}
  {{- $_ := set $pod "environment" $environment }}
  {{- $_ := set $pod "mounts" (printf "%s%s" ($pod.mounts | default "") (include "tokenmill.notifyMounts" .root)) }}
  {{- $_ := set $pod "volumes" (printf "%s%s" ($pod.volumes | default "") (include "tokenmill.notifyVolumes" .root)) }}
  {{- $_ := set $pod "containerFields" (include "tokenmill.metricsPorts" .root) }}
  spec: {{- include "tokenmill.podSpec" (merge $pod .) | nindent 4 }}
{{- end }}

{{/*
Return the variables for the announcements of a stage: those of all pods, and the numbers with which a worker recognizes
its last attempt. Input: the stage's dict, with "owner" (dict "kind" "label") if the Job belongs to another object. Output: a
YAML list, or nothing.
  {{ include "tokenmill.stageNotifyEnvironment" . }}
*/}}
{{- define "tokenmill.stageNotifyEnvironment" -}}
{{- $owner := .owner | default (dict "kind" "batch/v1/Job" "label" "batch.kubernetes.io/job-name") -}}
{{- include "tokenmill.notifyEnvironment" (merge (dict "root" .root) $owner) }}
{{- if include "tokenmill.notifies" .root }}
- {name: TOKENMILL_FAILURES, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"}}}
- {name: TOKENMILL_MAX_FAILURES, value: {{ toJson .root.Values.job.backoffLimitPerIndex | quote }}}
{{- end }}
{{- end }}

{{/*
Return a hash of the immutable spec, of job.runAgain and of the values for Kueue: another hash requires another Job.
Input: the stage's dict. Output: hex digits.
  {{ include "tokenmill.jobHash" . }}
*/}}
{{- define "tokenmill.jobHash" -}}
{{- $more := concat (list (toString .root.Values.job.runAgain)) (include "tokenmill.queueIdentity" .root | fromJsonArray) -}}
{{- list (include "tokenmill.jobSpec" . | fromYaml) $more | toJson | sha256sum | trunc 16 -}}
{{- end }}

{{/*
Return the name of the Job: fixed, or with the hash for tools that apply rendered files (`job.naming: hash`).
Input: the stage's dict. Output: a name.
  {{ include "tokenmill.jobName" . }}
*/}}
{{- define "tokenmill.jobName" -}}
{{- include "tokenmill.name" . -}}
{{- if eq .root.Values.job.naming "hash" }}-{{ include "tokenmill.jobHash" . | trunc 8 }}{{ end -}}
{{- end }}

{{/*
Return the complete spec of the Job, or of the empty Job that replaces it for an upgrade and completes without a pod.
Input: the stage's dict, and "empty": true for the empty Job. Output: YAML.
  {{ include "tokenmill.fullJobSpec" (merge (dict "empty" true) .) }}
*/}}
{{- define "tokenmill.fullJobSpec" -}}
{{- $job := .root.Values.job -}}
{{- $workers := ternary 0 .root.Values.workers .empty -}}
completions: {{ toJson $workers }}
parallelism: {{ toJson $workers }}
{{- range $key := list "maxFailedIndexes" "activeDeadlineSeconds" "ttlSecondsAfterFinished" }}
{{- $value := index $job $key }}
{{- if not (or $.empty (kindIs "invalid" $value)) }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- end }}
{{ include "tokenmill.jobSpec" . }}
{{- end }}
