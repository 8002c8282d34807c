{{/*
Return the spec of a TrainJob of Kubeflow Trainer 2, which creates a JobSet from its TrainingRuntime: its pods and labels
are those of a JobSet. Its reference to the runtime is immutable, so the API refuses to change it to another run.
Input: dict "root" $, "run", "empty" (runs nothing). Output: YAML of its spec.
  {{ include "megatron-training.trainjob" (dict "root" . "run" "" "empty" false) }}
*/}}
{{- define "megatron-training.trainjob" -}}
{{- if .empty }}
suspend: true
{{- end }}
runtimeRef: {apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {{ include "megatron-training.runtimeName" . | quote }}}
trainer: {numNodes: {{ toJson .root.Values.training.nodes }}}
{{- end }}

{{/*
Return the name of its TrainingRuntime. Input: the same dict. Output: a name.
  {{ include "megatron-training.runtimeName" . }}
*/}}
{{- define "megatron-training.runtimeName" -}}
{{ .root.Release.Name }}-{{ .run | default "run" | trunc 8 }}
{{- end }}

{{/*
Return its TrainingRuntime. The API refuses a TrainJob without its runtime, and Helm would create the runtime after it. A
hook therefore creates the runtime first. Each run has a runtime of its own, which is never deleted or changed: Trainer
keeps a runtime while a TrainJob names it, and Helm would wait for its end, or use a runtime that is being deleted.
Input: dict "root" $, "run". Output: a document, or nothing.
  {{ include "megatron-training.runtime" (dict "root" . "run" $run) }}
*/}}
{{- define "megatron-training.runtime" }}
{{- $runtime := dict "root" .root "apiVersion" "trainer.kubeflow.org/v1alpha1" "kind" "TrainingRuntime" "name" (include "megatron-training.runtimeName" .) }}
{{- if and (eq .root.Values.engine "trainjob") (not (include "tokenmill.existingObject" $runtime)) }}
---
apiVersion: {{ $runtime.apiVersion }}
kind: {{ $runtime.kind }}
metadata:
  name: {{ $runtime.name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
  annotations:
    helm.sh/hook: pre-install,pre-upgrade
    helm.sh/hook-delete-policy: before-hook-creation
    helm.sh/hook-weight: "-2"
spec:
  mlPolicy: {numNodes: {{ toJson .root.Values.training.nodes }}}
  template:
    spec:
      {{- $labels := dict "trainer.kubeflow.org/trainjob-ancestor-step" "trainer" }}
      {{- include "megatron-training.jobsetSpec" (merge (dict "replicatedLabels" $labels "empty" false) .) | nindent 6 }}
{{- end }}
{{- end }}
