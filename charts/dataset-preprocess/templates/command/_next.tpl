{{/*
Return the command for the next step, the training. Input: the stage's dict, see tokenmill.stage. Output: text.
  {{ include "dataset-preprocess.next" (dict "root" . "stage" "preprocess" "source" (include "tokenmill.streamedSource" .)) }}
*/}}
{{- define "dataset-preprocess.next" -}}
{{- $directories := include "tokenmill.directories" . | fromYaml -}}
{{- $storage := .root.Values.storage -}}
{{- $namespace := "" }}{{ if ne .root.Release.Namespace "default" }}{{ $namespace = printf " -n %s" .root.Release.Namespace }}{{ end -}}
Next, after completion:
  helm install megatron-training charts/megatron-training{{ $namespace }} {{ include "tokenmill.setOption" (list "storage.pvcName" ($storage.outputPvcName | default $storage.pvcName | default "NAME")) }}
    {{- with ternary $storage.outputSubPath $storage.subPath (not (empty $storage.outputPvcName)) }} {{ include "tokenmill.setOption" (list "storage.subPath" .) }}{{ end }} \
    {{ include "tokenmill.setOption" (list "storage.datasetPath" ($directories.writes | default $directories.reads)) }} --set model.size=NAME
{{- end }}
