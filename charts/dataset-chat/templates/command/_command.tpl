{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-chat.command" . | fromJson }}
*/}}
{{- define "dataset-chat.command" -}}
{{- include "tokenmill.validateTokenizer" . -}}
{{- $dataset := .Values.dataset }}{{ $tokenizer := .Values.tokenizer }}{{ $rows := .Values.rows }}{{ $train := .Values.train -}}
{{- $template := include "dataset-chat.template" . | fromJson -}}
{{- $roles := list }}{{ range $name, $role := $dataset.roleMap }}{{ $roles = append $roles (printf "%s=%s" $name $role) }}{{ end -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "files" $template.files
      "flags" (merge (include "tokenmill.reading" . | fromYaml) (dict
        "target-files" $dataset.targetFiles
        "name" $dataset.name
        "messages" $dataset.messages
        "tools" $dataset.tools
        "role-map" (ternary (join "," $roles) nil (gt (len $roles) 0))
        "chat-template" $template.argument
        "tokenizer" (include "tokenmill.tokenizer" .)
        "tokenizer-revision" $tokenizer.revision
        "tokenizer-source" $tokenizer.source
        "special-in-text" $tokenizer.specialInText
        "eod-token" $tokenizer.eodToken
        "train" $train.turns
        "train-reasoning" $train.reasoning
        "train-tool-calls" $train.toolCalls
        "train-end" $train.end
        "stop-tokens" $train.stopTokens
        "tool-arguments" $rows.toolArguments
        "empty-answer" $rows.emptyAnswer
        "unrendered" $rows.unrendered
        "prompt-template" $rows.promptTemplate
        "separator" $rows.separator
        "strip" $rows.strip
        "append-eos" $rows.appendEos
        "date" $rows.date
        "max-length" .Values.length.maximum
        "over-long" .Values.length.overLong
        "rendering" .Values.rendering
        "encoder" .Values.encoder
        "verify-encoder" .Values.verifyEncoder
        "on-bad-record" .Values.onBadRecord
        "max-bad-records" .Values.maxBadRecords
        "processes" .Values.processes)) | toJson -}}
{{- end }}
