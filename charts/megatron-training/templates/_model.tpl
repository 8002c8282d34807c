{{/*
The model: a preset of models/ with what model.custom replaces, or model.custom alone. Input: $. Output: JSON.
  {{ $model := include "megatron-training.model" . | fromJson }}
*/}}
{{- define "megatron-training.model" -}}
{{- $size := toString .Values.model.size -}}
{{- $preset := dict -}}
{{- if ne $size "custom" -}}
{{- $file := .Files.Get (printf "models/%s.yaml" $size) -}}
{{- if and (not $file) (not (include "megatron-training.sizes" .)) }}{{ include "tokenmill.missing" "models" }}{{ end }}
{{- if not $file }}
{{- fail (printf "\nmodel.size=%s is not known. Known: %s, custom.\nChoose one, or describe the model with --set model.size=custom --set model.custom.numLayers=... (charts/megatron-training/README.md)." $size (include "megatron-training.sizes" .)) }}
{{- end -}}
{{- $preset = omit (fromYaml $file) "recipe" -}}
{{- end -}}
{{- $_ := set $preset "name" $size -}}
{{- /* Not `merge`, to which 0 and false are as good as nothing. */}}
{{- range $key, $value := include "megatron-training.said" .Values.model.custom | fromJson }}{{ $_ := set $preset $key $value }}{{ end -}}
{{ toJson $preset }}
{{- end }}

{{/*
The presets. Input: $. Output: names, comma-separated.
  {{ include "megatron-training.sizes" . }}
*/}}
{{- define "megatron-training.sizes" -}}
{{- $names := list -}}
{{- range $path, $_ := .Files.Glob "models/*.yaml" }}{{ $names = append $names (base $path | trimSuffix ".yaml") }}{{ end -}}
{{ sortAlpha $names | join ", " }}
{{- end }}

{{/*
What is said of a section of values: nulls left out, and numbers with a point, which --set hands over as strings, made
numbers again. Input: a dict. Output: JSON.
  {{ $training := include "megatron-training.said" .Values.training | fromJson }}
*/}}
{{- define "megatron-training.said" -}}
{{- $said := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "invalid" $value -}}
{{- else if and (kindIs "string" $value) (regexMatch "^[0-9.]+([eE]-?[0-9]+)?$" $value) -}}
{{- $_ := set $said $key (float64 $value) -}}
{{- else -}}
{{- $_ := set $said $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $said }}
{{- end }}

{{/*
How the model lies on the GPUs, as far as the values say it; `batch` and `micro` are 0 where they are derived later.
Input: $. Output: JSON of counts.
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
