{{/*
The command that follows when the pairs are there. Input: the stage's dict, see tokenmill.stage. Output: text.
  {{ include "dataset-preprocess.next" (dict "root" . "stage" "preprocess" "source" (include "dataset-preprocess.source" .)) }}
*/}}
{{- define "dataset-preprocess.next" -}}
{{- $found := include "tokenmill.directories" . | fromYaml -}}
{{- $storage := .root.Values.storage -}}
{{- $n := "" }}{{ if ne .root.Release.Namespace "default" }}{{ $n = printf " -n %s" .root.Release.Namespace }}{{ end -}}
Next, when it is complete:
  helm install megatron-training charts/megatron-training{{ $n }} {{ include "tokenmill.setting" (list "storage.pvcName" ($storage.outputPvcName | default $storage.pvcName)) }}
    {{- with ternary $storage.outputSubPath $storage.subPath (not (empty $storage.outputPvcName)) }} {{ include "tokenmill.setting" (list "storage.subPath" .) }}{{ end }} \
    {{ include "tokenmill.setting" (list "storage.datasetPath" ($found.writes | default $found.reads)) }} --set model.size=NAME
{{- end }}
