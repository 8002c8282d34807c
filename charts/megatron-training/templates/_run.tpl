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
      "spec" (include $template (dict "root" . "run" $run "empty" false))
      "empty" (include $template (dict "root" . "run" $run "empty" true))) (include "megatron-training.engine" .Values.engine | fromYaml) -}}
{{- $hooks := "pre-install,pre-upgrade,pre-rollback" -}}
{{- if eq (include "tokenmill.connected" .) "true" }}{{ $hooks = printf "pre-install,%s" (include "tokenmill.clearingHooks" $object) }}{{ end -}}
{{- include "megatron-training.runtime" (dict "root" . "run" $run "hooks" $hooks) }}
{{- include "tokenmill.workload" $object }}
{{- end }}
