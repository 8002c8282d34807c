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
template:
  metadata:
    labels: {{- include "tokenmill.podLabels" . | nindent 6 }}
    {{- with include "tokenmill.podAnnotations" .root }}
    annotations: {{- . | nindent 6 }}
    {{- end }}
  {{- $environment := "- {name: TOKENMILL_RUN, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['batch.kubernetes.io/controller-uid']\"}}}" }}
  {{- $pod := dict "arguments" (include "tokenmill.arguments" .) }}
  {{- if .files }}
  {{- $_ := set $pod "mounts" (printf "- {name: files, mountPath: %s, readOnly: true}" (include "tokenmill.filesPath" .)) }}
  {{- $_ := set $pod "volumes" (printf "- name: files\n  configMap: {name: %q}" (include "tokenmill.filesName" .)) }}
  {{- if .importFiles }}{{ $environment = printf "%s\n- {name: PYTHONPATH, value: %s}" $environment (include "tokenmill.filesPath" .) }}{{ end }}
  {{- end }}
  {{- $_ := set $pod "environment" (printf "%s%s" $environment (include "tokenmill.metricsEnvironment" .root)) }}
  {{- $_ := set $pod "containerFields" (include "tokenmill.metricsPorts" .root) }}
  spec: {{- include "tokenmill.podSpec" (merge $pod .) | nindent 4 }}
{{- end }}

{{/*
Return a hash of the immutable spec, of job.runAgain and of Kueue's queue: another hash requires another Job.
Input: the stage's dict. Output: hex digits.
  {{ include "tokenmill.jobHash" . }}
*/}}
{{- define "tokenmill.jobHash" -}}
{{- $more := list (toString .root.Values.job.runAgain) (.root.Values.kueue.queueName | default "") -}}
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
