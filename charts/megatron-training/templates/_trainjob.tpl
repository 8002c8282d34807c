{{/*
Return the spec of a TrainJob of Kubeflow Trainer 2, which creates a JobSet from its TrainingRuntime: its pods and labels
are those of a JobSet. Input: dict "root" $, "empty" (runs nothing). Output: YAML of its spec.
  {{ include "megatron-training.trainjob" (dict "root" . "run" "" "empty" false) }}
*/}}
{{- define "megatron-training.trainjob" -}}
{{- if .empty }}
suspend: true
{{- end }}
runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {{ .root.Release.Name | quote }}}
trainer: {numNodes: {{ toJson .root.Values.training.nodes }}}
{{- if not .empty }}
{{- /* This field is immutable: a change of the runtime changes the run, and so recreates the TrainJob. */}}
runtimePatches:
  - manager: tokenmill/run
    trainingRuntimeSpec: {template: {metadata: {annotations: {tokenmill/run: {{ .run | quote }}}}}}
{{- end }}
{{- end }}

{{/*
Return its TrainingRuntime. The API refuses a TrainJob without its runtime, and Helm would create the runtime after it. A
hook therefore creates the runtime first. Helm does not delete objects of hooks when the release is uninstalled.
Input: dict "root" $, "run", "hooks" (when to create it). Output: a document, or nothing.
  {{ include "megatron-training.runtime" (dict "root" . "run" $run "hooks" "pre-install") }}
*/}}
{{- define "megatron-training.runtime" }}
{{- if eq .root.Values.engine "trainjob" }}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {{ .root.Release.Name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
  annotations:
    helm.sh/hook: {{ .hooks }}
    helm.sh/hook-delete-policy: before-hook-creation
    helm.sh/hook-weight: "1"
spec:
  mlPolicy: {numNodes: {{ toJson .root.Values.training.nodes }}}
  template:
    spec:
      {{- $labels := dict "trainer.kubeflow.org/trainjob-ancestor-step" "trainer" }}
      {{- include "megatron-training.jobsetSpec" (merge (dict "replicatedLabels" $labels "empty" false) .) | nindent 6 }}
{{- end }}
{{- end }}
