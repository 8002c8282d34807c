{{/*
Return the name of the pods' service account; empty for the namespace's default account. Input: $. Output: a name.
  {{ include "tokenmill.serviceAccountName" . }}
*/}}
{{- define "tokenmill.serviceAccountName" -}}
{{- with .Values.serviceAccount }}{{ .name | default (ternary $.Release.Name "" .create) }}{{ end -}}
{{- end }}

{{/*
Return the ServiceAccount, if `serviceAccount.create` is true. Its annotations name the role that IRSA or workload identity
grants to the pods. Their webhooks mount their own tokens, so this account does not mount one.
Input: $. Output: a document, or nothing.
  {{ include "tokenmill.serviceAccount" . }}
*/}}
{{- define "tokenmill.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
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
