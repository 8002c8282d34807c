{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-preprocess.command" . | fromJson }}
*/}}
{{- define "dataset-preprocess.command" -}}
{{- include "tokenmill.validateTokenizer" . -}}
{{- $dataset := .Values.dataset -}}
{{- $tokenizer := .Values.tokenizer -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "flags" (merge (include "tokenmill.reading" . | fromYaml) (dict
        "txt-document" $dataset.txtDocument
        "target-files" $dataset.targetFiles
        "name" $dataset.name
        "keys" (join "," $dataset.keys)
        "tokenizer" (include "tokenmill.tokenizer" .)
        "tokenizer-revision" $tokenizer.revision
        "special-tokens" $tokenizer.specialTokens
        "tokenizer-source" $tokenizer.source
        "special-in-text" $tokenizer.specialInText
        "append-eod" $tokenizer.appendEod
        "eod-token" $tokenizer.eodToken
        "encoder" .Values.encoder
        "verify-encoder" .Values.verifyEncoder
        "on-bad-record" .Values.onBadRecord
        "max-bad-records" .Values.maxBadRecords
        "processes" .Values.processes)) | toJson -}}
{{- end }}
