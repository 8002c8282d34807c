{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-chat.command" . | fromJson }}
*/}}
{{- define "dataset-chat.command" -}}
{{- include "tokenmill.validateTokenizer" . -}}
{{- $template := include "dataset-chat.template" . | fromJson -}}
{{- $roles := list }}{{ range $name, $role := .Values.dataset.roleMap }}{{ $roles = append $roles (printf "%s=%s" $name $role) }}{{ end -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "files" $template.files
      "flags" (merge (include "dataset-chat.options" . | fromJson) (dict
        "revision" (ternary .Values.dataset.revision nil (eq true .Values.dataset.stream))
        "role-map" (ternary (join "," $roles) nil (gt (len $roles) 0))
        "chat-template" $template.argument
        "tokenizer" (include "tokenmill.tokenizer" .))) | toJson -}}
{{- end }}
