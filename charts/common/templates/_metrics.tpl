{{/*
Return the fields of a container that serves metrics, if `metrics.enabled` is true. Input: $. Output: YAML, or nothing.
  {{ include "tokenmill.metricsPorts" . }}
*/}}
{{- define "tokenmill.metricsPorts" -}}
{{- with .Values.metrics }}{{ if .enabled -}}
ports: [{name: metrics, containerPort: {{ toJson .port }}}]
{{- end }}{{ end -}}
{{- end }}

{{/*
Return the environment variables that set where a pod's metrics go. A URL of a Pushgateway without a group gets the labels
that Prometheus gives to a pod's metrics. Input: $. Output: a YAML list, or nothing.
  env: {{ include "tokenmill.metricsEnvironment" . | nindent 2 }}
*/}}
{{- define "tokenmill.metricsEnvironment" -}}
{{- $group := printf "/metrics/job/%s/namespace/%s/app_kubernetes_io_instance/%s" .Chart.Name .Release.Namespace .Release.Name }}
{{- with .Values.metrics }}
{{- if .enabled }}
- {name: TOKENMILL_METRICS_LISTEN, value: ":{{ toJson .port }}"}
{{- end }}
{{- if .pushgateway }}
- {name: TOKENMILL_METRICS_PUSH, value: {{ printf "%s%s" (trimSuffix "/" .pushgateway) (contains "/metrics/job/" .pushgateway | ternary "" $group) | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return the annotations of a pod that serves metrics: `podAnnotations`, and those by which a Prometheus without an operator
finds pods. Input: $. Output: YAML, or nothing.
  {{ with include "tokenmill.podAnnotations" . }}annotations: {{ . | nindent 2 }}{{ end }}
*/}}
{{- define "tokenmill.podAnnotations" -}}
{{- $annotations := dict -}}
{{- with .Values.metrics }}{{ if and .enabled .annotations }}
{{- $annotations = dict "prometheus.io/scrape" "true" "prometheus.io/port" (toJson .port) "prometheus.io/path" "/metrics" }}
{{- end }}{{ end -}}
{{- with merge (dict) (.Values.podAnnotations | default dict) $annotations }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/*
Return the ingress rule of a NetworkPolicy for the scrapes. Input: $. Output: a YAML list, empty without metrics.
  "ingress" (include "tokenmill.metricsIngress" . | fromYamlArray)
*/}}
{{- define "tokenmill.metricsIngress" -}}
{{- $metrics := .Values.metrics -}}
{{- if $metrics.enabled -}}
{{ toYaml (list (dict "from" $metrics.allowFrom "ports" (list (dict "protocol" "TCP" "port" $metrics.port)))) }}
{{- else -}}
[]
{{- end -}}
{{- end }}
