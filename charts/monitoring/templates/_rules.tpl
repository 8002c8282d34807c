{{/*
Return true if the chart shall create an object of the Prometheus operator. Input: dict "root" $ "enabled" true, false or
null, where null stands for: if the cluster has the API. Output: true, or nothing.
  {{ if include "monitoring.usesOperator" (dict "root" . "enabled" .Values.podMonitor.enabled) }}
*/}}
{{- define "monitoring.usesOperator" -}}
{{- if kindIs "bool" .enabled }}{{ if .enabled }}true{{ end }}
{{- else if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- end }}

{{/*
Return rules.yaml with the thresholds, labels and runbooks of the values, without the disabled alerts. Input: $. Output:
YAML.
  spec: {{ include "monitoring.rules" . | nindent 2 }}
*/}}
{{- define "monitoring.rules" -}}
{{- $values := .Values.prometheusRule -}}
{{- $text := .Files.Get "rules.yaml" -}}
{{- range $key, $threshold := .Values.alerts }}{{ $text = replace (printf "${%s}" $key) (toJson $threshold) $text }}{{ end -}}
{{- $groups := list -}}
{{- $unknown := $values.disabledAlerts -}}
{{- range $group := (fromYaml $text).groups -}}
  {{- $rules := list -}}
  {{- range $rule := $group.rules -}}
    {{- $unknown = without $unknown $rule.alert -}}
    {{- if not (has $rule.alert $values.disabledAlerts) -}}
      {{- $labels := merge (dict) ($values.alertLabels | default dict) $rule.labels -}}
      {{- $runbook := dict "runbook_url" (printf "%s#%s" $values.runbook (lower $rule.alert)) -}}
      {{- $parts := dict "labels" $labels "annotations" (merge (dict) $rule.annotations $runbook) -}}
      {{- $rules = append $rules (merge $parts $rule) -}}
    {{- end -}}
  {{- end -}}
  {{- if $rules }}{{ $groups = append $groups (dict "name" $group.name "rules" $rules) }}{{ end -}}
{{- end -}}
{{- with $unknown }}{{ fail (printf "prometheusRule.disabledAlerts: there is no alert %s; see docs/observe.md" (first .)) }}{{ end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end }}
