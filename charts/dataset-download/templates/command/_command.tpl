{{/*
Return the command's arguments. Input: $. Output: JSON of source and flags, see tokenmill.stage.
  {{ include "dataset-download.command" . | fromJson }}
*/}}
{{- define "dataset-download.command" -}}
{{- include "dataset-download.validate" . -}}
{{- $dataset := .Values.dataset -}}
{{- dict
      "source" ($dataset.source | default (printf "hf://datasets/%s" $dataset.repo))
      "flags" (merge (include "tokenmill.selection" . | fromYaml) (dict
        "revision" $dataset.revision
        "layout" $dataset.layout
        "connections" $dataset.connections
        "deadline" $dataset.deadlineSeconds
        "stall-seconds" $dataset.stallSeconds)) | toJson -}}
{{- end }}
