{{/*
The kind that an engine's name stands for. Input: the name. Output: YAML of apiVersion and kind.
  {{ $engine := include "megatron-training.engine" "jobset" | fromYaml }}
*/}}
{{- define "megatron-training.engine" -}}
{{- $kinds := dict
      "pytorchjob" (dict "apiVersion" "kubeflow.org/v1" "kind" "PyTorchJob")
      "jobset" (dict "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet")
      "trainjob" (dict "apiVersion" "trainer.kubeflow.org/v1alpha1" "kind" "TrainJob") -}}
{{ index $kinds . | toYaml }}
{{- end }}

{{/*
What one run is known by: a hash of all that must not change while it runs, which leaves out what its end alone is
about. Pods have it as TOKENMILL_RUN.
Input: $. Output: hex digits.
  {{ $run := include "megatron-training.run" . }}
*/}}
{{- define "megatron-training.run" -}}
{{- $engine := .Values.engine -}}
{{- $parts := list $engine (.Values.kueue.queueName | default "") -}}
{{- range ternary (list "trainjob" "jobsetSpec") (list $engine) (eq $engine "trainjob") -}}
{{- $part := include (printf "megatron-training.%s" .) (dict "root" $ "run" "" "empty" false "replicatedLabels" dict) | fromYaml -}}
{{- $parts = append $parts (omit $part "runPolicy" "ttlSecondsAfterFinished") -}}
{{- end -}}
{{ toJson $parts | sha256sum | trunc 16 }}
{{- end }}

{{/*
The run and what clears its place, of whichever kind. Input: $. Output: documents.
  {{ include "megatron-training.objects" . }}
*/}}
{{- define "megatron-training.objects" -}}
{{- $run := include "megatron-training.run" . -}}
{{- $template := printf "megatron-training.%s" .Values.engine -}}
{{- $object := merge (dict "root" . "name" .Release.Name "hash" $run "trialLength" 20
      "untried" (eq .Values.engine "trainjob")
      "onRollback" .Values.job.onRollback
      "spec" (include $template (dict "root" . "run" $run "empty" false))
      "empty" (include $template (dict "root" . "run" $run "empty" true))) (include "megatron-training.engine" .Values.engine | fromYaml) -}}
{{- $hooks := ternary "pre-upgrade" "pre-upgrade,pre-rollback" (eq .Values.job.onRollback "keep") -}}
{{- if eq (include "tokenmill.connected" .) "true" }}{{ $hooks = include "tokenmill.clearingHooks" $object }}{{ end -}}
{{- $hooks = join "," (compact (list "pre-install" $hooks)) -}}
{{- include "megatron-training.runtime" (dict "root" . "run" $run "hooks" $hooks) }}
{{- include "tokenmill.workload" $object }}
{{- end }}

{{/*
What runs now under this release's name: its engine, which an upgrade compares without a right to look at other engines'
objects, and its run, which pods compare with their own. A rollback changes a PyTorchJob in place; its pods then see that
the run is another one, save, and end, and the next ones are those of the target revision.
Input: $. Output: a document.
  {{ include "megatron-training.current" . }}
*/}}
{{- define "megatron-training.current" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "megatron-training.currentName" . | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
data:
  engine: {{ .Values.engine }}
  run: {{ include "megatron-training.run" . | quote }}
{{- end }}
{{- define "megatron-training.currentName" -}}
{{ .Release.Name }}-run
{{- end }}
