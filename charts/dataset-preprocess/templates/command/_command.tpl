{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-preprocess.command" . | fromJson }}
*/}}
{{- define "dataset-preprocess.command" -}}
{{- include "dataset-preprocess.validate" . -}}
{{- $dataset := .Values.dataset -}}
{{- $tokenizer := .Values.tokenizer -}}
{{- dict
      "source" (include "dataset-preprocess.source" .)
      "flags" (merge (include "tokenmill.selection" . | fromYaml) (dict
        "revision" (ternary $dataset.revision nil (eq true $dataset.stream))
        "from" $dataset.fromStage
        "format" $dataset.format
        "txt-document" $dataset.txtDocument
        "zstd-window" $dataset.zstdWindow
        "max-record-size" $dataset.maxRecordSize
        "target-files" $dataset.targetFiles
        "name" $dataset.name
        "keys" (join "," $dataset.keys)
        "tokenizer" (include "dataset-preprocess.tokenizer" .)
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
