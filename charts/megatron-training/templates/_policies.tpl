{{/*
Who may connect to whom, where `networkPolicy.enabled` asks for it: the pods of a run to each other, at any port, since NCCL
and gloo choose theirs; `helm test` and `tensorboard.allowFrom` to TensorBoard. What goes over InfiniBand or EFA passes no
policy. Input: $. Output: documents, or none.
  {{ include "megatron-training.networkPolicies" . }}
*/}}
{{- define "megatron-training.networkPolicies" -}}
{{- $name := .Release.Name -}}
{{- $board := include "megatron-training.tensorboardName" . -}}
{{- $pods := dict -}}
{{- range $component := list "train" "tensorboard" "test" -}}
{{- $_ := set $pods $component (list (dict "podSelector" (include "tokenmill.podsOf" (dict "root" $ "component" $component) | fromYaml))) -}}
{{- end -}}
{{- $dns := .Values.networkPolicy.dns -}}
{{- $egress := include "tokenmill.egress" (dict "root" . "rules" list) | fromYamlArray -}}
{{- $http := list (dict "protocol" "TCP" "port" 6006) -}}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "train" "name" $name
      "ingress" (list (dict "from" $pods.train))
      "egress" (concat (list (dict "to" $pods.train)) $dns (.Values.networkPolicy.egress | default list))) }}
{{- if .Values.dataset.buildIndex.enabled }}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "index" "name" (printf "%s-index" $name) "egress" $egress) }}
{{- end }}
{{- if .Values.tensorboard.enabled }}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "tensorboard" "name" $board
      "ingress" (list (dict "from" (concat $pods.test .Values.tensorboard.allowFrom) "ports" $http))) }}
{{- include "tokenmill.networkPolicy" (dict "root" . "component" "test" "name" (printf "%s-test" $name)
      "egress" (concat (list (dict "to" $pods.tensorboard "ports" $http)) $dns)) }}
{{- end }}
{{- end }}

{{/*
A PodDisruptionBudget that asks for every pod of the run, where `podDisruptionBudget.enabled` asks for it. By number:
the owners of these pods say of no scale, and without one the API takes neither a percentage nor maxUnavailable. Pods that
are not ready, such as those that wait for others, may go. Input: $. Output: a document, or none.
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
  selector: {{- include "tokenmill.podsOf" (dict "root" . "component" "train") | nindent 4 }}
{{- end }}
{{- end }}
