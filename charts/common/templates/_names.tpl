{{/*
Return the name of a stage's Job before a hash is added: RELEASE for download, RELEASE-STAGE for the others, or "name",
which a chart of several stages passes. Input: dict "root" $ "stage" "extract". Output: a name.
  {{ include "tokenmill.name" . }}
*/}}
{{- define "tokenmill.name" -}}
{{- if .name }}{{ .name }}{{ else if eq .stage "download" }}{{ .root.Release.Name }}{{ else }}{{ .root.Release.Name }}-{{ .stage }}{{ end -}}
{{- end }}

{{/*
Return the labels by which users and Services find a release's pods. They are the same for every version of a chart,
because the pod template of a Job is immutable. Input: $. Output: YAML.
  {{ include "tokenmill.selectorLabels" . | nindent 4 }}
*/}}
{{- define "tokenmill.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: tokenmill
{{- end }}

{{/*
Return the labels of an object. Input: $. Output: YAML.
  {{ include "tokenmill.labels" . | nindent 4 }}
*/}}
{{- define "tokenmill.labels" -}}
{{ include "tokenmill.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/*
Return the container image. A tag may be a number (--set image.tag=20260422 passes one), which toJson prints without an
exponent. A digest decides which image is pulled, whatever the tag.
Input: $. Output: repository:tag, or repository:tag@digest.
  image: {{ include "tokenmill.image" . | quote }}
*/}}
{{- define "tokenmill.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{ .Values.image.repository }}:{{ if kindIs "string" $tag }}{{ $tag }}{{ else }}{{ toJson $tag }}{{ end }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}
