{{/*
Return the model: a preset of models/ with the fields of model.custom, or only model.custom. Input: $. Output: JSON.
  {{ $model := include "megatron-training.model" . | fromJson }}
*/}}
{{- define "megatron-training.model" -}}
{{- $size := toString .Values.model.size -}}
{{- $preset := dict -}}
{{- if ne $size "custom" -}}
{{- $file := .Files.Get (printf "models/%s.yaml" $size) -}}
{{- if and (not $file) (not (include "megatron-training.sizes" .)) }}{{ include "tokenmill.failMissingFiles" "models" }}{{ end }}
{{- if not $file }}
{{- fail (printf "\nmodel.size=%s is not a known size: the sizes are %s and custom.\nSet one of them, or describe the model with --set model.size=custom --set model.custom.numLayers=... (charts/megatron-training/README.md)." $size (include "megatron-training.sizes" .)) }}
{{- end -}}
{{- $preset = omit (fromYaml $file) "recipe" -}}
{{- end -}}
{{- $_ := set $preset "name" $size -}}
{{- /* `merge` would ignore 0 and false. */}}
{{- range $key, $value := include "megatron-training.setValues" .Values.model.custom | fromJson }}{{ $_ := set $preset $key $value }}{{ end -}}
{{ toJson $preset }}
{{- end }}

{{/*
Return the names of the presets. Input: $. Output: names, comma-separated.
  {{ include "megatron-training.sizes" . }}
*/}}
{{- define "megatron-training.sizes" -}}
{{- $names := list -}}
{{- range $path, $_ := .Files.Glob "models/*.yaml" }}{{ $names = append $names (base $path | trimSuffix ".yaml") }}{{ end -}}
{{ sortAlpha $names | join ", " }}
{{- end }}

{{/*
Return the values of a section that are set: without nulls, and with decimal numbers, which --set passes as strings,
converted to numbers. Input: a dict. Output: JSON.
  {{ $training := include "megatron-training.setValues" .Values.training | fromJson }}
*/}}
{{- define "megatron-training.setValues" -}}
{{- $setValues := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "invalid" $value -}}
{{- else if and (kindIs "string" $value) (regexMatch "^[0-9.]+([eE]-?[0-9]+)?$" $value) -}}
{{- $_ := set $setValues $key (float64 $value) -}}
{{- else -}}
{{- $_ := set $setValues $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $setValues }}
{{- end }}

{{/*
Return the layout of the model on the GPUs as far as the values specify it. `batch` and `micro` are 0 if the command
derives them later. Input: $. Output: JSON of counts.
  {{ $layout := include "megatron-training.layout" . | fromJson }}
*/}}
{{- define "megatron-training.layout" -}}
{{- $model := include "megatron-training.model" . | fromJson -}}
{{- $parallel := .Values.parallelism -}}
{{- $training := .Values.training -}}
{{- $tensor := $parallel.tensorModelParallelSize | default $model.tensorModelParallelSize | default 1 | int64 -}}
{{- $pipeline := $parallel.pipelineModelParallelSize | default $model.pipelineModelParallelSize | default 1 | int64 -}}
{{- $context := $parallel.contextParallelSize | default 1 | int64 -}}
{{- $world := mul (int64 $training.nodes) (int64 $training.gpusPerNode) -}}
{{- $copy := mul $tensor $pipeline $context -}}
{{ dict "tensor" $tensor "pipeline" $pipeline "context" $context "world" $world "copy" $copy "copies" (div $world $copy)
        "batch" ($training.globalBatchSize | default 0 | int64) "micro" ($training.microBatchSize | default 0 | int64) | toJson }}
{{- end }}
