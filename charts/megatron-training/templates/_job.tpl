{{/*
Return a Job of one pod without GPUs, RELEASE-STAGE, and the hooks that delete it. Input: a dict of
  root, stage, arguments, mounts, volumes, environment   as for tokenmill.podSpec
  section   the values of the Job: resources, nodeSelector, tolerations
Output: documents.
  {{ include "megatron-training.job" (dict "root" . "stage" "index" "section" .Values.dataset.buildIndex ...) }}
*/}}
{{- define "megatron-training.job" -}}
{{- $spec := include "megatron-training.jobSpec" (merge (dict "pods" 1) .) -}}
{{- include "tokenmill.workload" (dict "root" .root "apiVersion" "batch/v1" "kind" "Job"
      "name" (printf "%s-%s" .root.Release.Name .stage)
      "hash" (list $spec (toString .root.Values.job.runAgain) | toJson | sha256sum | trunc 16)
      "spec" $spec
      "onRollback" "clear"
      "empty" (include "megatron-training.jobSpec" (merge (dict "pods" 0) .))) }}
{{- end }}

{{/*
Return the spec of that Job. Input: the same dict, and "pods": 1, or 0 for a Job that runs nothing. Output: YAML.
  {{ include "megatron-training.jobSpec" (merge (dict "pods" 1) .) }}
*/}}
{{- define "megatron-training.jobSpec" -}}
{{- $pod := merge (dict
      "claims" (include "megatron-training.claims" .root | fromYamlArray)
      "resources" .section.resources
      "graceSeconds" 30
      "placement" (pick .section "nodeSelector" "tolerations")) . -}}
completions: {{ .pods }}
parallelism: {{ .pods }}
backoffLimit: 5
podFailurePolicy:
  rules:
    - action: Ignore  # an eviction or a drain is not a failure of the pod
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailJob  # exit code 2: a retry cannot help
      onExitCodes: {containerName: {{ .stage }}, operator: In, values: [2]}
template:
  metadata:
    labels: {{- include "tokenmill.podLabels" $pod | nindent 6 }}
    {{- with .root.Values.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec: {{- include "tokenmill.podSpec" $pod | nindent 4 }}
{{- end }}

{{/*
Return the Job that builds Megatron-LM's sample index. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.index" . }}
*/}}
{{- define "megatron-training.index" -}}
{{- if .Values.dataset.buildIndex.enabled }}
{{- include "megatron-training.job" (dict "root" . "stage" "index" "section" .Values.dataset.buildIndex
      "arguments" (printf "- train\n- --build-index\n- %s" (include "megatron-training.settingsPath" .))
      "environment" "- {name: USER, value: tokenmill}"
      "mounts" "- {name: settings, mountPath: /etc/tokenmill-training, readOnly: true}\n- {name: scratch, mountPath: /tmp, subPath: tmp}"
      "volumes" (printf "- name: settings\n  configMap: {name: %q}" (include "megatron-training.settingsName" .))) }}
{{- end }}
{{- end }}
