{{/*
Return the Job that builds Megatron-LM's sample index without GPUs, RELEASE-index. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.index" . }}
*/}}
{{- define "megatron-training.index" -}}
{{- if .Values.dataset.buildIndex.enabled }}
{{- $spec := include "megatron-training.indexSpec" (dict "root" . "pods" 1) -}}
{{- include "tokenmill.workload" (dict "root" . "apiVersion" "batch/v1" "kind" "Job" "name" (printf "%s-index" .Release.Name)
      "hash" (list $spec (toString .Values.job.runAgain) | toJson | sha256sum | trunc 16)
      "spec" $spec
      "onRollback" "clear"
      "empty" (include "megatron-training.indexSpec" (dict "root" . "pods" 0))) }}
{{- end }}
{{- end }}

{{/*
Return the spec of that Job. Input: dict "root" $, "pods": 1, or 0 for a Job that runs nothing. Output: YAML.
  {{ include "megatron-training.indexSpec" (dict "root" . "pods" 1) }}
*/}}
{{- define "megatron-training.indexSpec" -}}
{{- $root := .root -}}
{{- $build := $root.Values.dataset.buildIndex -}}
{{- $pod := dict "root" $root "stage" "index"
      "arguments" (printf "- train\n- --build-index\n- %s" (include "megatron-training.settingsPath" $root))
      "environment" "- {name: USER, value: tokenmill}"
      "claims" (include "megatron-training.claims" $root | fromYamlArray)
      "resources" $build.resources
      "mounts" "- {name: settings, mountPath: /etc/tokenmill-training, readOnly: true}\n- {name: scratch, mountPath: /tmp, subPath: tmp}"
      "volumes" (printf "- name: settings\n  configMap: {name: %q}" (include "megatron-training.settingsName" $root))
      "graceSeconds" 30
      "placement" (pick $build "nodeSelector" "tolerations") -}}
completions: {{ .pods }}
parallelism: {{ .pods }}
backoffLimit: 5
podFailurePolicy:
  rules:
    - action: Ignore  # an eviction or a drain is not a failure of the pod
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailJob  # exit code 2: a retry cannot help
      onExitCodes: {containerName: index, operator: In, values: [2]}
template:
  metadata:
    labels: {{- include "tokenmill.podLabels" $pod | nindent 6 }}
    {{- with $root.Values.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec: {{- include "tokenmill.podSpec" $pod | nindent 4 }}
{{- end }}
