{{/*
Return the command's arguments. Input: $. Output: JSON of flags, see tokenmill.stage.
  {{ include "dataset-concatenate.command" . | fromJson }}
*/}}
{{- define "dataset-concatenate.command" -}}
{{- $dataset := .Values.dataset -}}
{{- dict
      "flags" (merge (include "tokenmill.selection" . | fromYaml) (dict
        "from" $dataset.fromStage
        "format" $dataset.format
        "target-files" $dataset.targetFiles
        "name" $dataset.name
        "processes" .Values.processes)) | toJson -}}
{{- end }}
