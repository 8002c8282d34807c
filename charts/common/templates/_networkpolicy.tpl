{{/*
Return a NetworkPolicy for the pods of one component of a release, if `networkPolicy.enabled` is true. It allows only the
connections of its rules. Volumes are not affected, because the node mounts them.
Input: a dict of
  root, component, name
  ingress, egress   lists of rules as in Kubernetes; default: no rules
Output: a document, or nothing.
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
  podSelector: {{- include "tokenmill.componentSelector" . | nindent 4 }}
  policyTypes: [Ingress, Egress]
  ingress: {{- .ingress | default list | toYaml | nindent 4 }}
  egress: {{- .egress | default list | toYaml | nindent 4 }}
{{- end }}
{{- end }}

{{/*
Return the selector of a component's pods. Input: dict "root" "component". Output: YAML of a selector.
  podSelector: {{ include "tokenmill.componentSelector" (dict "root" . "component" "train") | nindent 4 }}
*/}}
{{- define "tokenmill.componentSelector" -}}
matchLabels:
  {{- include "tokenmill.selectorLabels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/*
Return the egress rules: `networkPolicy.egress`, or "rules" when it is null, and "more" in both cases. If there is a rule,
DNS is allowed too. Input: dict "root", "rules" (a list), "more" (a list, default: none). Output: a YAML list.
  {{ include "tokenmill.egress" (dict "root" . "rules" list) | fromYamlArray }}
*/}}
{{- define "tokenmill.egress" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $rules := ternary .rules $policy.egress (kindIs "invalid" $policy.egress) -}}
{{- $rules = concat $rules (.more | default list) -}}
{{- if $rules }}{{ $rules = concat $policy.dns $rules }}{{ end -}}
{{ toYaml $rules }}
{{- end }}

{{/*
Return the rule for TCP 443 anywhere. Input: anything. Output: a YAML list.
  {{ include "tokenmill.https" . | fromYamlArray }}
*/}}
{{- define "tokenmill.https" -}}
- ports: [{protocol: TCP, port: 443}]
{{- end }}

{{/*
Return the rules for buckets, if a stage reads or writes one. Input: the stage's dict. Output: a YAML list.
  {{ include "tokenmill.bucketRules" . | fromYamlArray }}
*/}}
{{- define "tokenmill.bucketRules" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- if contains "://" (print $paths.reads $paths.writes) }}{{ include "tokenmill.https" . }}{{ else }}[]{{ end -}}
{{- end }}

{{/*
Return the policies of a stage and of its test. Input: the stage's dict. Output: documents, or nothing.
  {{ include "tokenmill.stagePolicies" . }}
*/}}
{{- define "tokenmill.stagePolicies" -}}
{{- include "tokenmill.stagePolicy" . }}
{{- $rules := include "tokenmill.bucketRules" . | fromYamlArray -}}
{{- if $rules }}{{ $rules = include "tokenmill.egress" (dict "root" .root "rules" $rules) | fromYamlArray }}{{ end -}}
{{- include "tokenmill.networkPolicy" (dict "root" .root "component" "verify" "name" (printf "%s-verify" (include "tokenmill.name" .)) "egress" $rules) }}
{{- end }}

{{/*
Return the policy of a stage. Pods that download files or a tokenizer may connect to TCP 443; pods of the other stages, which
only read files, may not connect anywhere. Pods that announce their end may connect to its receiver. A pod accepts only scrapes of its metrics. Input: the stage's dict. Output: a document, or nothing.
  {{ include "tokenmill.stagePolicy" . }}
*/}}
{{- define "tokenmill.stagePolicy" -}}
{{- $rules := include "tokenmill.bucketRules" . | fromYamlArray -}}
{{- if or (eq .stage "download") (contains "://" (.source | default "")) (not (empty .root.Values.tokenizer)) }}{{ $rules = include "tokenmill.https" . | fromYamlArray }}{{ end -}}
{{- include "tokenmill.networkPolicy" (dict "root" .root "component" .stage "name" (include "tokenmill.name" .)
      "ingress" (include "tokenmill.metricsIngress" .root | fromYamlArray)
      "egress" (include "tokenmill.egress" (dict "root" .root "rules" $rules "more" (include "tokenmill.notifyEgress" .root | fromYamlArray)) | fromYamlArray)) }}
{{- end }}
