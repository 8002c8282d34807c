{{/*
Return the name of the pods' service account; empty for the namespace's default account. Input: $. Output: a name.
  {{ include "tokenmill.serviceAccountName" . }}
*/}}
{{- define "tokenmill.serviceAccountName" -}}
{{- with .Values.serviceAccount }}{{ .name | default (ternary $.Release.Name "" (or .create (eq true ($.Values.notify).event))) }}{{ end -}}
{{- end }}

{{/*
Return the ServiceAccount, if `serviceAccount.create` is true, or if `notify.event` needs one. Its annotations name the role that IRSA or workload identity
grants to the pods. Their webhooks mount their own tokens, so this account does not mount one.
Input: $. Output: a document, or nothing.
  {{ include "tokenmill.serviceAccount" . }}
*/}}
{{- define "tokenmill.serviceAccount" -}}
{{- if or .Values.serviceAccount.create (and (.Values.notify).event (not .Values.serviceAccount.name)) }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "tokenmill.serviceAccountName" . | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
  {{- with .Values.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end }}
