{{/*
Return the command's arguments. Input: $. Output: JSON of flags, see tokenmill.stage.
  {{ include "dataset-extract.command" . | fromJson }}
*/}}
{{- define "dataset-extract.command" -}}
{{- dict
      "flags" (merge (include "tokenmill.selection" . | fromYaml) (dict
        "from" .Values.dataset.fromStage
       "format" .Values.dataset.format
       "zstd-window" .Values.dataset.zstdWindow
       "processes" .Values.processes)) | toJson -}}
{{- end }}
