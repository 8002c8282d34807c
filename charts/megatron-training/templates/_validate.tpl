{{/*
What is refused before a pod is made: arithmetic on several keys, names, and what the cluster lacks. The schema runs first
and owns types and unknown keys; whether data and memory fit is for `tokenmill train` to say, before a GPU is used.
Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validate" . }}
*/}}
{{- define "megatron-training.validate" -}}
{{- include "tokenmill.validateClaimName" . -}}
{{- include "megatron-training.validateModel" . -}}
{{- include "megatron-training.validateLayout" . -}}
{{- include "megatron-training.validateValues" . -}}
{{- include "megatron-training.validateName" . -}}
{{- include "megatron-training.validateCluster" . -}}
{{- end }}

{{/*
A model says what it is made of, and has a position for each token. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateModel" . }}
*/}}
{{- define "megatron-training.validateModel" -}}
{{- $model := include "megatron-training.model" . | fromJson -}}
{{- range list "numLayers" "hiddenSize" "numAttentionHeads" }}
{{- if not (index $model .) }}
{{- fail (printf "\nmodel.size=custom has no model.custom.%s.\nGive numLayers, hiddenSize and numAttentionHeads at least, as in --set model.custom.numLayers=24 --set model.custom.hiddenSize=1024 --set model.custom.numAttentionHeads=16." .) }}
{{- end }}
{{- end }}
{{- $length := $model.seqLength | default 2048 | int64 -}}
{{- $positions := $model.maxPositionEmbeddings | default $length | int64 -}}
{{- if gt $length $positions }}
{{- fail (printf "\nthe model %s has seqLength=%d and maxPositionEmbeddings=%d: a sequence has more tokens than there are positions.\nLower model.custom.seqLength to %d, or raise model.custom.maxPositionEmbeddings to %d." $model.name $length $positions $positions $length) }}
{{- end }}
{{- end }}

{{/*
GPUs divide into copies of the model, and the batch into the copies' micro-batches. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateLayout" . }}
*/}}
{{- define "megatron-training.validateLayout" -}}
{{- $at := include "megatron-training.layout" . | fromJson -}}
{{- $world := int64 $at.world }}{{ $copy := int64 $at.copy }}{{ $copies := int64 $at.copies -}}
{{- $nodes := int64 .Values.training.nodes }}{{ $gpus := int64 .Values.training.gpusPerNode -}}
{{- $model := printf "tensor %d x pipeline %d x context %d = %d" (int64 $at.tensor) (int64 $at.pipeline) (int64 $at.context) $copy -}}
{{- if mod $world $copy }}
{{- $fitting := $nodes -}}
{{- range untilStep 1 (int (add $copy 1)) 1 }}{{ if and (gt (int64 .) $nodes) (eq $fitting $nodes) (not (mod (mul . $gpus) $copy)) }}{{ $fitting = int64 . }}{{ end }}{{ end -}}
{{- if eq $fitting $nodes }}{{ range untilStep (int $copy) 0 -1 }}{{ if not (mod (mul . $gpus) $copy) }}{{ $fitting = int64 . }}{{ end }}{{ end }}{{ end -}}
{{- fail (printf "\ntraining.nodes=%d x training.gpusPerNode=%d = %d GPUs, and the model %s takes %s of them: %d / %d leaves %d over.\nSet training.nodes=%d (%d GPUs), or other values of parallelism.tensorModelParallelSize, .pipelineModelParallelSize and .contextParallelSize." $nodes $gpus $world (toString .Values.model.size) $model $world $copy (mod $world $copy) $fitting (mul $fitting $gpus)) }}
{{- end }}
{{- $batch := int64 $at.batch }}{{ $micro := int64 $at.micro -}}
{{- $step := mul $copies (default 1 $micro) -}}
{{- if and $batch (mod $batch $step) }}
{{- $what := printf "data parallel %d (%d GPUs / (%s))" $copies $world $model -}}
{{- if $micro }}{{ $what = printf "training.microBatchSize=%d x %s = %d" $micro $what $step }}{{ end -}}
{{- $nearest := list }}{{ if ge $batch $step }}{{ $nearest = append $nearest (printf "%d" (mul (div $batch $step) $step)) }}{{ end -}}
{{- $nearest = append $nearest (printf "%d" (mul (add (div $batch $step) 1) $step)) -}}
{{- fail (printf "\ntraining.globalBatchSize=%d is not divisible by %s: it leaves %d over.\nSet training.globalBatchSize=%s, or leave it out." $batch $what (mod $batch $step) (join " or " $nearest)) }}
{{- end }}
{{- end }}

{{/*
Values that contradict each other. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateValues" . }}
*/}}
{{- define "megatron-training.validateValues" -}}
{{- $training := .Values.training -}}
{{- if and $training.saveInterval (gt (int64 $training.saveInterval) (int64 $training.iterations)) }}
{{- fail (printf "\ntraining.saveInterval=%d is above training.iterations=%d: nothing would be saved before the end.\nLower it, or leave it out: a tenth of the iterations is then taken." (int64 $training.saveInterval) (int64 $training.iterations)) }}
{{- end }}
{{- if lt (int64 .Values.checkpoint.keep) 2 }}
{{- fail (printf "\ncheckpoint.keep=%d: at least 2 are kept, because the last one may be damaged when it is needed.\nSet checkpoint.keep=2 or more." (int64 .Values.checkpoint.keep)) }}
{{- end }}
{{- if and .Values.gang.minAvailable (ne .Values.engine "pytorchjob") }}
{{- fail (printf "\ngang.minAvailable=%d is for engine=pytorchjob, and engine=%s.\nLeave it out; kueue.queueName admits the pods of any engine together." (int64 .Values.gang.minAvailable) .Values.engine) }}
{{- end }}
{{- if gt (int64 (.Values.gang.minAvailable | default 0)) (int64 $training.nodes) }}
{{- fail (printf "\ngang.minAvailable=%d is more than training.nodes=%d: no pod would ever start.\nSet gang.minAvailable=%d." (int64 .Values.gang.minAvailable) (int64 $training.nodes) (int64 $training.nodes)) }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.network.hostNetwork }}
{{- fail "\nnetworkPolicy.enabled=true does nothing for pods with network.hostNetwork=true: they have the node's own addresses.\nSet one of them to false." }}
{{- end }}
{{- $storage := .Values.storage -}}
{{- $on := include "megatron-training.directories" . | fromJson -}}
{{- $mount := include "megatron-training.writes" . -}}
{{- range $key, $path := dict "storage.datasetPath" $on.dataset "storage.checkpointPath" $on.checkpoints "storage.logsPath" $on.logs "checkpoint.loadPath" .Values.checkpoint.loadPath "dataset.cachePath" .Values.dataset.cachePath "storage.subPath" $storage.subPath "storage.checkpointSubPath" $storage.checkpointSubPath }}
{{- include "tokenmill.validatePath" (dict "key" $key "path" $path "mount" (ternary $storage.mountPath $mount (eq $key "storage.datasetPath"))) -}}
{{- end }}
{{- range $key, $parts := .Values.dataset.blend }}
{{- if kindIs "slice" $parts }}
{{- range $parts }}{{ include "tokenmill.validatePath" (dict "key" (printf "dataset.blend.%s" $key) "path" .path "mount" $storage.mountPath) }}{{ end }}
{{- end }}
{{- end }}
{{- if not (or $on.dataset .Values.dataset.blend) }}
{{- fail "\nneither storage.datasetPath nor dataset.blend says what to train on.\nAdd --set storage.datasetPath=DIRECTORY, an output of dataset-preprocess on the volume." }}
{{- end }}
{{- include "tokenmill.validateMount" (dict "key" "storage.mountPath" "mount" $storage.mountPath) -}}
{{- include "tokenmill.validateMount" (dict "key" "storage.checkpointMountPath" "mount" $storage.checkpointMountPath) -}}
{{- if and $storage.checkpointPvcName (eq $storage.mountPath $storage.checkpointMountPath) }}
{{- fail (printf "\nstorage.mountPath and storage.checkpointMountPath are both %s.\nGive two claims two places." $storage.mountPath) }}
{{- end }}
{{- end }}

{{/*
Names of pods and services that the engine makes of the release's are DNS labels. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateName" . }}
*/}}
{{- define "megatron-training.validateName" -}}
{{- $release := .Release.Name -}}
{{- $last := sub (int64 .Values.training.nodes) 1 -}}
{{- $names := list (printf "%s-node-0-%d-xxxxx" $release $last) -}}
{{- if eq .Values.engine "pytorchjob" }}{{ $names = list (ternary (printf "%s-worker-%d" $release (sub $last 1)) (printf "%s-master-0" $release) (gt $last 0)) }}{{ end -}}
{{- if .Values.tensorboard.enabled }}{{ $names = append $names (include "megatron-training.tensorboardName" .) }}{{ end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $release) }}
{{- fail (printf "\nthe release name %q cannot be that of a %s, which begins with a letter and has no dot; choose another, such as %q." $release (include "megatron-training.engine" .Values.engine | fromYaml).kind (printf "run-%s" (replace "." "-" $release))) }}
{{- end }}
{{- range $names }}
{{- if gt (len .) 63 }}
{{- fail (printf "\nthe release name %q is too long: it would make %q, %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." $release . (len .) (sub (len .) 63)) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
What the cluster must have, where this render can see it; and no run of the same release under another engine, which
would go on for its grace period and save over the new one's checkpoints. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateCluster" . }}
*/}}
{{- define "megatron-training.validateCluster" -}}
{{- $engine := include "megatron-training.engine" .Values.engine | fromYaml -}}
{{- $storage := .Values.storage -}}
{{- if eq (include "tokenmill.connected" .) "true" }}
{{- if not (.Capabilities.APIVersions.Has (printf "%s/%s" $engine.apiVersion $engine.kind)) }}
{{- $operators := dict "pytorchjob" "Kubeflow's training operator" "jobset" "JobSet" "trainjob" "Kubeflow Trainer 2" -}}
{{- $there := list -}}
{{- range $name := keys $operators | sortAlpha }}
{{- $other := include "megatron-training.engine" $name | fromYaml }}
{{- if $.Capabilities.APIVersions.Has (printf "%s/%s" $other.apiVersion $other.kind) }}{{ $there = append $there (printf "--set engine=%s" $name) }}{{ end }}
{{- end }}
{{- fail (printf "\nengine=%s needs %s, and this cluster knows no %s of %s.\nInstall it, or take an engine that is there: %s." .Values.engine (index $operators .Values.engine) $engine.kind $engine.apiVersion (join ", " $there | default "none is")) }}
{{- end }}
{{- $runs := (lookup "v1" "ConfigMap" .Release.Namespace (include "megatron-training.currentName" .)).data }}
{{- if and $runs (ne $runs.engine .Values.engine) }}
{{- $other := (include "megatron-training.engine" $runs.engine | fromYaml).kind }}
{{- fail (printf "\nthe release %s runs as a %s, and engine=%s would start a second run on its checkpoints while the first one ends.\nUninstall it first (helm uninstall %s -n %s --wait), and install again when its pods are gone: it goes on from the last checkpoint." .Release.Name $other .Values.engine .Release.Name .Release.Namespace) }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateCluster" (merge (dict "root" . "name" .Release.Name
      "claims" (dict "storage.pvcName" $storage.pvcName "storage.checkpointPvcName" $storage.checkpointPvcName)) $engine) -}}
{{- end }}
