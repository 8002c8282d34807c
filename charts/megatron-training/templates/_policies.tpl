{{/*
Return the network policies, if `networkPolicy.enabled` is true. The pods of a run may connect to each other at any port,
because NCCL and gloo choose their ports. `helm test` and `tensorboard.allowFrom` may connect to TensorBoard. An
import from the Hub, and a run with data or checkpoints in buckets, may connect to TCP 443. Network policies do not affect traffic over InfiniBand or EFA. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.networkPolicies" . }}
*/}}
{{- define "megatron-training.networkPolicies" -}}
{{- $name := .Release.Name -}}
{{- $board := include "megatron-training.tensorboardName" . -}}
{{- $pods := dict -}}
{{- range $component := list "train" "tensorboard" "test" -}}
{{- $_ := set $pods $component (list (dict "podSelector" (include "tokenmill.componentSelector" (dict "root" $ "component" $component) | fromYaml))) -}}
{{- end -}}
{{- $dns := .Values.networkPolicy.dns -}}
{{- $https := include "tokenmill.https" . | fromYamlArray -}}
{{- $data := pick (include "megatron-training.settings" . | fromJson) "dataset" "training" "checkpoint" "logs" | toJson -}}
{{- $buckets := ternary $https list (contains "://" $data) -}}
{{- $http := list (dict "protocol" "TCP" "port" 6006) -}}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "train" "name" $name
      "ingress" (concat (list (dict "from" $pods.train)) (include "tokenmill.metricsIngress" . | fromYamlArray))
      "egress" (concat (list (dict "to" $pods.train)) $dns (ternary $buckets .Values.networkPolicy.egress (kindIs "invalid" .Values.networkPolicy.egress)) (include "tokenmill.notifyEgress" . | fromYamlArray))) }}
{{- range $component, $section := dict "export" .Values.checkpoint.export "import" .Values.checkpoint.import "index" .Values.dataset.buildIndex }}
{{- if $section.enabled }}
{{- $rules := ternary $https list (or (hasPrefix "hf://" ($section.source | default "")) (and (eq $component "index") (not (empty $buckets)))) }}
{{- include "tokenmill.networkPolicy" (dict "root" $ "component" $component "name" (printf "%s-%s" $name $component)
      "egress" (include "tokenmill.egress" (dict "root" $ "rules" $rules) | fromYamlArray)) }}
{{- end }}
{{- end }}
{{- if eq (include "megatron-training.hasTensorboard" .) "true" }}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "tensorboard" "name" $board
      "ingress" (list (dict "from" (concat $pods.test .Values.tensorboard.allowFrom) "ports" $http))) }}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "test" "name" (printf "%s-test" $name)
      "egress" (concat (list (dict "to" $pods.tensorboard "ports" $http)) $dns)) }}
{{- end }}
{{- end }}

{{/*
Return a PodDisruptionBudget that requires every pod of the run, if `podDisruptionBudget.enabled` is true. It specifies a
number, because the owners of these pods have no scale subresource, without which the API accepts neither a percentage nor
maxUnavailable. Pods that are not ready, such as those that wait for others, may be evicted. Input: $. Output: a document,
or nothing.
  {{ include "megatron-training.disruptionBudget" . }}
*/}}
{{- define "megatron-training.disruptionBudget" -}}
{{- if .Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .Release.Name | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
spec:
  minAvailable: {{ toJson .Values.training.nodes }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector: {{- include "tokenmill.componentSelector" (dict "root" . "component" "train") | nindent 4 }}
{{- end }}
{{- end }}
