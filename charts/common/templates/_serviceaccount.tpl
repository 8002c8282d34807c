{{/*
The service account of a release's pods, empty for the namespace's default one. Input: $. Output: a name.
  {{ include "tokenmill.serviceAccountName" . }}
*/}}
{{- define "tokenmill.serviceAccountName" -}}
{{- with .Values.serviceAccount }}{{ .name | default (ternary $.Release.Name "" .create) }}{{ end -}}
{{- end }}

{{/*
The ServiceAccount itself, where `serviceAccount.create` asks for it. Its annotations name the role that IRSA or
workload identity gives to the pods; their webhooks mount tokens of their own, so none is mounted here.
Input: $. Output: a document.
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
