{{/*
Return the template of the conversations: `argument` of the command, and `files` that it names. A text with a brace or with
several lines is a template, *.jinja is a file on the volume, and anything else is a name, which the schema checks.
Input: $, with "section" if these values are a section of another chart. Output: JSON.
  {{ $template := include "dataset-chat.template" . | fromJson }}
*/}}
{{- define "dataset-chat.template" -}}
{{- $choice := .Values.dataset.chatTemplate -}}
{{- $argument := $choice }}{{ $files := dict -}}
{{- if regexMatch "[{\\n]" $choice -}}
{{- $argument = printf "%s/chat-template.jinja" (include "tokenmill.filesPath" .) -}}
{{- $files = dict "chat-template.jinja" $choice -}}
{{- else if hasSuffix ".jinja" $choice -}}
{{- include "tokenmill.validatePath" (dict "key" "dataset.chatTemplate" "path" $choice "mount" .Values.storage.mountPath) -}}
{{- $argument = printf "%s/%s" .Values.storage.mountPath $choice -}}
{{- end -}}
{{ dict "argument" $argument "files" $files | toJson }}
{{- end }}
