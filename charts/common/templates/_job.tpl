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
The whole spec of a Job; or of the empty one that clears its place, which completes without a pod.
Input: the stage's dict, and "clear": whether it is the empty one. Output: YAML.
  {{ include "tokenmill.jobWhole" (merge (dict "clear" true) .) }}
*/}}
{{- define "tokenmill.jobWhole" -}}
{{- $job := .root.Values.job -}}
{{- $workers := ternary 0 .root.Values.workers .clear -}}
completions: {{ toJson $workers }}
parallelism: {{ toJson $workers }}
{{- range $key := list "maxFailedIndexes" "activeDeadlineSeconds" "ttlSecondsAfterFinished" }}
{{- $value := index $job $key }}
{{- if not (or $.clear (kindIs "invalid" $value)) }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- end }}
{{ include "tokenmill.jobSpec" . }}
{{- end }}
