{{/*
Return the API version and kind of an engine. Input: the engine's name. Output: YAML of apiVersion and kind.
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
Return the identifier of a run: a hash of everything that must not change while it runs. Fields that take effect only after
its end are not part of it. Pods have it as TOKENMILL_RUN.
Input: $. Output: hex digits.
  {{ $run := include "megatron-training.run" . }}
*/}}
{{- define "megatron-training.run" -}}
{{- $engine := .Values.engine -}}
{{- $parts := concat (list $engine) (include "tokenmill.queueIdentity" . | fromJsonArray) -}}
{{- range ternary (list "trainjob" "jobsetSpec") (list $engine) (eq $engine "trainjob") -}}
{{- $part := include (printf "megatron-training.%s" .) (dict "root" $ "run" "" "empty" false "replicatedLabels" dict) | fromYaml -}}
{{- $parts = append $parts (omit $part "runPolicy" "ttlSecondsAfterFinished") -}}
{{- end -}}
{{ toJson $parts | sha256sum | trunc 16 }}
{{- end }}

{{/*
Return the run's object of the selected engine, and the hooks that delete it. Input: $. Output: documents.
  {{ include "megatron-training.objects" . }}
*/}}
{{- define "megatron-training.objects" -}}
{{- $run := include "megatron-training.run" . -}}
{{- $template := printf "megatron-training.%s" .Values.engine -}}
{{- $object := merge (dict "root" . "name" .Release.Name "hash" $run "trialLength" 20
      "skipTrial" (eq .Values.engine "trainjob")
      "onRollback" .Values.job.onRollback
      "pods" (include "megatron-training.trialPods" (dict "root" . "run" $run) | fromJson)
      "outdated" (include "megatron-training.hasOtherPods" (dict "root" . "run" $run))
      "spec" (include $template (dict "root" . "run" $run "empty" false))
      "empty" (include $template (dict "root" . "run" $run "empty" true))) (include "megatron-training.engine" .Values.engine | fromYaml) -}}
{{- include "megatron-training.runtime" (dict "root" . "run" $run) }}
{{- include "tokenmill.workload" $object }}
{{- end }}

{{/*
Return the pod templates of the run for a trial: those of a PyTorchJob's master and workers, that of the other engines' pods,
and TensorBoard's, which Helm would refuse only after the running run was deleted. Input: dict "root" $, "run".
Output: JSON of name to YAML.
  {{ include "megatron-training.trialPods" (dict "root" . "run" $run) | fromJson }}
*/}}
{{- define "megatron-training.trialPods" -}}
{{- $pods := dict "node" (include "megatron-training.podTemplate" (merge (dict "container" "node") .)) -}}
{{- if gt (len (include "megatron-training.setValues" .root.Values.master | fromJson)) 0 -}}
{{- $_ := set $pods "master" (include "megatron-training.podTemplate" (merge (dict "container" "node" "overrides" .root.Values.master) .)) -}}
{{- end -}}
{{- if .root.Values.tensorboard.enabled -}}
{{- $_ := set $pods "tensorboard" (include "megatron-training.tensorboardPod" (dict "root" .root "restartPolicy" "Never")) -}}
{{- end -}}
{{ toJson $pods }}
{{- end }}

{{/*
Return whether a pod of the cluster's PyTorchJob belongs to another run: a rollback changes a PyTorchJob in place, and its
operator replaces only pods that end. An upgrade then creates the PyTorchJob again. Input: dict "root" $, "run". Output: true
or nothing.
  {{ include "megatron-training.hasOtherPods" (dict "root" . "run" $run) }}
*/}}
{{- define "megatron-training.hasOtherPods" -}}
{{- if and (eq .root.Values.engine "pytorchjob") .root.Release.IsUpgrade (eq (include "tokenmill.connected" .root) "true") -}}
{{- $names := list (printf "%s-master-0" .root.Release.Name) -}}
{{- range until (sub (int64 .root.Values.training.nodes) 1 | int) }}{{ $names = append $names (printf "%s-worker-%d" $.root.Release.Name .) }}{{ end -}}
{{- $other := "" -}}
{{- range $names -}}
{{- range ((lookup "v1" "Pod" $.root.Release.Namespace .).spec).containers -}}
{{- range .env }}{{ if and (eq .name "TOKENMILL_RUN") (ne .value $.run) }}{{ $other = "true" }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{ $other }}
{{- end -}}
{{- end }}

{{/*
Return a ConfigMap with the release's current engine and run. An upgrade compares the engine without the right to read other
engines' objects. Pods of a PyTorchJob compare the run with their own: a rollback changes a PyTorchJob in place, and its pods
then detect another run, save and end; their replacements belong to the target revision.
Input: $. Output: a document.
  {{ include "megatron-training.runConfigMap" . }}
*/}}
{{- define "megatron-training.runConfigMap" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "megatron-training.runConfigMapName" . | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
data:
  engine: {{ .Values.engine }}
  run: {{ include "megatron-training.run" . | quote }}
{{- end }}
{{- define "megatron-training.runConfigMapName" -}}
{{ .Release.Name }}-run
{{- end }}
