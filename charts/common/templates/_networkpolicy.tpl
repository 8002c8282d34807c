{{/*
A NetworkPolicy for the pods of one component of a release, where `networkPolicy.enabled` asks for it: only the rules given
connect. Volumes are not concerned: the node mounts them.
Input: a dict of
  root, component, name
  ingress, egress   lists of rules as Kubernetes has them; none where they are left out
Output: a document, or none.
  {{ include "tokenmill.networkPolicy" (dict "root" . "component" "extract" "name" "x-extract") }}
*/}}
{{- define "tokenmill.networkPolicy" }}
{{- if .root.Values.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
spec:
  podSelector: {{- include "tokenmill.podsOf" . | nindent 4 }}
  policyTypes: [Ingress, Egress]
  ingress: {{- .ingress | default list | toYaml | nindent 4 }}
  egress: {{- .egress | default list | toYaml | nindent 4 }}
{{- end }}
{{- end }}

{{/*
What selects the pods of a component. Input: dict "root" "component". Output: YAML of a selector.
  podSelector: {{ include "tokenmill.podsOf" (dict "root" . "component" "train") | nindent 4 }}
*/}}
{{- define "tokenmill.podsOf" -}}
matchLabels:
  {{- include "tokenmill.selectorLabels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/*
Egress rules: `networkPolicy.egress`, or those given where it is null; and, where there is any, those for names.
Input: dict "root", "rules" (a list). Output: a YAML list.
  {{ include "tokenmill.egress" (dict "root" . "rules" list) | fromYamlArray }}
*/}}
{{- define "tokenmill.egress" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $rules := ternary .rules $policy.egress (kindIs "invalid" $policy.egress) -}}
{{- if $rules }}{{ $rules = concat $policy.dns $rules }}{{ end -}}
{{ toYaml $rules }}
{{- end }}

{{/*
The policies of a stage and of its test. Input: the stage's dict. Output: documents, or none.
  {{ include "tokenmill.stagePolicies" . }}
*/}}
{{- define "tokenmill.stagePolicies" -}}
{{- include "tokenmill.stagePolicy" . }}
{{- include "tokenmill.networkPolicy" (dict "root" .root "component" "verify" "name" (printf "%s-verify" (include "tokenmill.name" .))) }}
{{- end }}

{{/*
The policy of a stage: its pods connect to what it fetches from, those that read files alone to nothing, and nothing
connects to them. Input: the stage's dict. Output: a document, or none.
  {{ include "tokenmill.stagePolicy" . }}
*/}}
{{- define "tokenmill.stagePolicy" -}}
{{- $https := list (dict "ports" (list (dict "protocol" "TCP" "port" 443))) -}}
{{- $rules := ternary $https list (has .stage (list "download" "preprocess")) -}}
{{- include "tokenmill.networkPolicy" (dict "root" .root "component" .stage "name" (include "tokenmill.name" .)
      "egress" (include "tokenmill.egress" (dict "root" .root "rules" $rules) | fromYamlArray)) }}
{{- end }}
