{{/*
A TrainJob of Kubeflow Trainer 2, which makes a JobSet of its TrainingRuntime: pods and labels are those of a JobSet.
Input: dict "root" $, "empty" (runs nothing). Output: YAML of its spec.
  {{ include "megatron-training.trainjob" (dict "root" . "run" "" "empty" false) }}
*/}}
{{- define "megatron-training.trainjob" -}}
{{- if .empty }}
suspend: true
{{- end }}
runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {{ .root.Release.Name | quote }}}
trainer: {numNodes: {{ toJson .root.Values.training.nodes }}}
{{- if not .empty }}
{{- /* Immutable, so that a change of what the runtime holds makes the TrainJob anew. */}}
runtimePatches:
  - manager: tokenmill/run
    trainingRuntimeSpec: {template: {metadata: {annotations: {tokenmill/run: {{ .run | quote }}}}}}
{{- end }}
{{- end }}

{{/*
Its runtime. A TrainJob is refused whose runtime is not there, and Helm would create it later: a hook creates it first.
Helm leaves what hooks created when the release goes.
Input: dict "root" $, "run", "hooks" (when it must be made). Output: a document, or none.
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
