{{/*
Return the directories of a run, relative to their volumes, or addresses of buckets. `load` has the weights that the run starts with: those of the
import, unless checkpoint.loadPath names others; it is empty without weights. Input: $. Output: JSON of `dataset`,
`checkpoints`, `logs`, `import`, `export`, `load`.
  {{ $directories := include "megatron-training.directories" . | fromJson }}
*/}}
{{- define "megatron-training.directories" -}}
{{- $storage := .Values.storage -}}
{{- $checkpoint := .Values.checkpoint -}}
{{- $import := $checkpoint.import.path | default (printf "imported/%s" .Release.Name) -}}
{{- $logs := ternary (printf "%s/logs" ($storage.checkpointPath | default "")) (printf "logs/%s" .Release.Name) (contains "://" ($storage.checkpointPath | default "")) -}}
{{ dict "dataset" $storage.datasetPath
        "checkpoints" ($storage.checkpointPath | default (printf "checkpoints/%s-%s" .Release.Name (toString .Values.model.size)))
        "logs" ($storage.logsPath | default $logs)
        "import" $import
        "export" ($checkpoint.export.path | default (printf "exported/%s" .Release.Name))
        "load" ($checkpoint.loadPath | default (ternary $import "" (eq true $checkpoint.import.enabled))) | toJson }}
{{- end }}

{{/*
Return the mount path of the volume that a run writes to: the checkpoints' claim, or that of the data. Input: $. Output: a
path.
  {{ include "megatron-training.outputMount" . }}
*/}}
{{- define "megatron-training.outputMount" -}}
{{- with .Values.storage }}{{ ternary .checkpointMountPath .mountPath (not (empty .checkpointPvcName)) }}{{ end -}}
{{- end }}

{{/*
Return the path in the pods of a directory that a run writes or loads, or its address. Input: list of $ and a name of
megatron-training.directories, except `dataset`. Output: a path.
  {{ include "megatron-training.outputPath" (list . "logs") }}
*/}}
{{- define "megatron-training.outputPath" -}}
{{- include "tokenmill.place" (list (include "megatron-training.outputMount" (first .)) (get (include "megatron-training.directories" (first .) | fromJson) (last .))) }}
{{- end }}

{{/*
Return the settings file that training pods mount and jobs/tokenmill/train/settings.py reads. Input: $. Output: JSON.
  settings.json: {{ include "megatron-training.settings" . | quote }}
*/}}
{{- define "megatron-training.settings" -}}
{{- $values := .Values -}}
{{- $directories := include "megatron-training.directories" . | fromJson -}}
{{- $outputMount := include "megatron-training.outputMount" . -}}
{{- $training := include "megatron-training.setValues" (omit $values.training "saveInterval" "useSharp" "phases") | fromJson -}}
{{- $_ := set $training "useSharp" (has (toString $values.training.useSharp) (list "1" "true")) -}}
{{- $checkpoint := include "megatron-training.setValues" (merge (dict "saveInterval" $values.training.saveInterval) (omit $values.checkpoint "loadPath" "import" "export")) | fromJson -}}
{{- $_ := set $checkpoint "path" (include "megatron-training.outputPath" (list . "checkpoints")) -}}
{{- with $directories.load }}{{ $_ := set $checkpoint "loadPath" (printf "%s/%s" $outputMount .) }}{{ end -}}
{{- $dataset := dict "split" $values.dataset.split -}}
{{- with $values.dataset.key }}{{ $_ := set $dataset "key" . }}{{ end -}}
{{- with $values.dataset.cachePath }}{{ $_ := set $dataset "cachePath" (printf "%s/%s" $outputMount .) }}{{ end -}}
{{- if $values.dataset.allowChange }}{{ $_ := set $dataset "allowChange" true }}{{ end -}}
{{- if $values.training.phases -}}
{{- $_ := set $training "phases" (include "megatron-training.phases" . | fromJson).phases -}}
{{- else if $values.dataset.blend -}}
{{- $_ := set $dataset "blend" (include "megatron-training.blend" . | fromJson).blend -}}
{{- else -}}
{{- $_ := set $dataset "path" (include "tokenmill.place" (list $values.storage.mountPath $directories.dataset)) -}}
{{- end -}}
{{- $arguments := list -}}
{{- range $values.extraArgs }}{{ $arguments = append $arguments (ternary . (toJson .) (kindIs "string" .)) }}{{ end -}}
{{- $sft := dict -}}
{{- if $values.sft.enabled -}}
{{- $sft = dict "sft" (dict "promptFormat" $values.sft.promptFormat "tokenizerPath" (printf "%s/%s" $values.storage.mountPath $values.sft.tokenizerPath)) -}}
{{- end -}}
{{ merge $sft (dict "release" .Release.Name
        "model" (include "megatron-training.model" . | fromJson)
        "training" $training
        "parallelism" (include "megatron-training.setValues" $values.parallelism | fromJson)
        "checkpoint" $checkpoint
        "dataset" $dataset
        "logs" (dict "path" (include "megatron-training.outputPath" (list . "logs")))
        "gpu" (include "megatron-training.setValues" (pick $values.gpu "memoryGib" "peakTflops") | fromJson)
        "supervision" (include "megatron-training.setValues" $values.supervision | fromJson)
        "trainer" (include "megatron-training.setValues" $values.trainer | fromJson)
        "extraArgs" $arguments
        "runAgain" (toString $values.job.runAgain)) | toJson }}
{{- end }}

{{/*
Return the datasets of a blend, with paths in the pods. Input: $. Output: JSON of `blend`: the datasets, or the path of a
file that names them.
  {{ (include "megatron-training.blend" . | fromJson).blend }}
*/}}
{{- define "megatron-training.blend" -}}
{{- $mount := .Values.storage.mountPath -}}
{{- $blend := dict -}}
{{- if kindIs "string" .Values.dataset.blend -}}
{{- $blend = printf "%s/%s" $mount .Values.dataset.blend -}}
{{- else -}}
{{- range $key, $value := .Values.dataset.blend -}}
{{- if kindIs "slice" $value -}}
{{- $parts := list -}}
{{- range $value }}{{ $parts = append $parts (merge (dict "path" (include "tokenmill.place" (list $mount .path))) (include "megatron-training.setValues" . | fromJson)) }}{{ end -}}
{{- $_ := set $blend $key $parts -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $blend $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ dict "blend" $blend | toJson }}
{{- end }}

{{/*
Return the phases of a run, with paths in the pods. Input: $. Output: JSON of `phases`: a list, or the path of a file.
  {{ (include "megatron-training.phases" . | fromJson).phases }}
*/}}
{{- define "megatron-training.phases" -}}
{{- $mount := .Values.storage.mountPath -}}
{{- $phases := list -}}
{{- if kindIs "string" .Values.training.phases -}}
{{- $phases = printf "%s/%s" $mount .Values.training.phases -}}
{{- else -}}
{{- range .Values.training.phases -}}
{{- $parts := list -}}
{{- range .blend }}{{ $parts = append $parts (merge (dict "path" (include "tokenmill.place" (list $mount .path))) (include "megatron-training.setValues" . | fromJson)) }}{{ end -}}
{{- $phases = append $phases (merge (dict "blend" $parts) (include "megatron-training.setValues" (omit . "blend") | fromJson)) -}}
{{- end -}}
{{- end -}}
{{ dict "phases" $phases | toJson }}
{{- end }}

{{/*
Return the name of the ConfigMap with the settings file. The name contains a hash of the content, so that a pod of an old
run never reads the settings of a new one. Input: $. Output: a name.
  {{ include "megatron-training.settingsName" . }}
*/}}
{{- define "megatron-training.settingsName" -}}
{{ .Release.Name }}-settings-{{ include "megatron-training.settings" . | sha256sum | trunc 10 }}
{{- end }}

{{/*
Return that ConfigMap. Input: $. Output: a document.
  {{ include "megatron-training.configMap" . }}
*/}}
{{- define "megatron-training.configMap" }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "megatron-training.settingsName" . | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
immutable: true
data:
  settings.json: |
    {{- include "megatron-training.settings" . | fromJson | toPrettyJson | nindent 4 }}
{{- end }}
