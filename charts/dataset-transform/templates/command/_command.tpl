{{/*
Return the command's arguments. Input: $. Output: JSON of source, flags and files, see tokenmill.stage.
  {{ include "dataset-transform.command" . | fromJson }}
*/}}
{{- define "dataset-transform.command" -}}
{{- include "dataset-transform.validate" . -}}
{{- $function := .Values.function -}}
{{- $arguments := list }}{{ range $name, $key := $function.arguments }}{{ $arguments = append $arguments (printf "%s=%s" $name $key) }}{{ end -}}
{{- $files := dict }}{{ with $function.source }}{{ $files = dict (printf "%s.py" (first (splitList ":" $function.name))) . }}{{ end -}}
{{- dict
      "source" (include "tokenmill.streamedSource" .)
      "files" $files
      "importFiles" true
      "flags" (merge (include "tokenmill.reading" . | fromYaml) (dict
        "transform" $function.name
        "set" $arguments
        "shard-size" .Values.shards.size
        "shards" .Values.shards.number
        "output-format" .Values.shards.format
        "compression" .Values.shards.compression
        "on-bad-record" .Values.onBadRecord
        "max-bad-records" .Values.maxBadRecords
        "processes" .Values.processes)) | toJson -}}
{{- end }}
