{{/*
The name of a stage's Job before a hash is added: the release for download, <release>-<stage> for the others; or the
"name" that a chart of several stages gives it. Input: dict "root" $ "stage" "extract". Output: a name.
  {{ include "tokenmill.name" . }}
*/}}
{{- define "tokenmill.name" -}}
{{- if .name }}{{ .name }}{{ else if eq .stage "download" }}{{ .root.Release.Name }}{{ else }}{{ .root.Release.Name }}-{{ .stage }}{{ end -}}
{{- end }}

{{/*
Labels by which people and Services find a release's pods; the same for every version of a chart, because a Job's pod
template cannot change. Input: $. Output: YAML.
  {{ include "tokenmill.selectorLabels" . | nindent 4 }}
*/}}
{{- define "tokenmill.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: tokenmill
{{- end }}

{{/*
Labels of an object. Input: $. Output: YAML.
  {{ include "tokenmill.labels" . | nindent 4 }}
*/}}
{{- define "tokenmill.labels" -}}
{{ include "tokenmill.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/*
The container image. A tag may be a number (--set image.tag=20260422 arrives as one), which toJson prints whole; a digest
decides what is pulled, whatever the tag. Input: $. Output: repository:tag, or repository:tag@digest.
  image: {{ include "tokenmill.image" . | quote }}
*/}}
{{- define "tokenmill.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{ .Values.image.repository }}:{{ if kindIs "string" $tag }}{{ $tag }}{{ else }}{{ toJson $tag }}{{ end }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}
