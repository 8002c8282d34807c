{{/*
Return the directory in a stage's pods that contains the files of its values. Input: anything. Output: a path.
  {{ include "tokenmill.filesPath" . }}
*/}}
{{- define "tokenmill.filesPath" -}}
/etc/tokenmill-files
{{- end }}

{{/*
Return the name of the ConfigMap with the files of a stage's values. The name contains a hash of the content: other files
need another Job. Input: the stage's dict. Output: a name.
  {{ include "tokenmill.filesName" . }}
*/}}
{{- define "tokenmill.filesName" -}}
{{ include "tokenmill.name" . }}-files-{{ toJson .files | sha256sum | trunc 10 }}
{{- end }}

{{/*
Return that ConfigMap, if the stage's dict has files. JSON keeps each byte of a text. Input: the stage's dict. Output: a
document, or nothing.
  {{ include "tokenmill.files" . }}
*/}}
{{- define "tokenmill.files" -}}
{{- if .files }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "tokenmill.filesName" . | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
immutable: true
data:
  {{- range $name, $text := .files }}
  {{ $name }}: {{ toJson $text }}
  {{- end }}
{{- end }}
{{- end }}

{{/*
Check that the files fit into a ConfigMap. Input: the stage's dict. Output: nothing, or fails.
  {{ include "tokenmill.validateFiles" . }}
*/}}
{{- define "tokenmill.validateFiles" -}}
{{- range $name, $text := .files }}
{{- if gt (len $text) 900000 }}
{{- fail (printf "\nthe values contain a file %s of %d bytes: a ConfigMap and Helm's release hold less than 1 MiB.\nShorten it to 900,000 bytes." $name (len $text)) }}
{{- end }}
{{- end }}
{{- end }}
