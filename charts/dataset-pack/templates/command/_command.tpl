{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-pack.command" . | fromJson }}
*/}}
{{- define "dataset-pack.command" -}}
{{- $dataset := .Values.dataset }}{{ $rows := .Values.rows }}{{ $parallel := .Values.parallelism }}{{ $shards := .Values.shards -}}
{{- $blend := include "dataset-pack.blend" . -}}
{{- dict
      "source" (ternary (printf "%s/blend.json" (include "tokenmill.filesPath" .)) "" (not (empty $blend)))
      "files" (ternary (dict "blend.json" $blend) dict (not (empty $blend)))
      "flags" (dict
        "from" $dataset.fromStage
        "key" $dataset.key
        "pack-size" $dataset.packSize
        "algorithm" $rows.algorithm
        "seed" $rows.seed
        "epochs" $rows.epochs
        "count" $rows.count
        "rows-multiple-of" $rows.multipleOf
        "over-long" $rows.overLong
        "cp" $parallel.contextParallelSize
        "tp" $parallel.tensorModelParallelSize
        "sp" $parallel.sequenceParallel
        "format" $shards.format
        "shards" $shards.number
        "valid-shards" $shards.validation
        "test-shards" $shards.test
        "processes" .Values.processes) | toJson -}}
{{- end }}
