{{/*
Refuse invalid values before a pod is created, because pods may wait hours for GPUs and minutes for their image: values that
an installation chooses and that contradict each other, names, and the state of the cluster. The schema runs first and
checks types and unknown keys. `tokenmill train` checks the model, data and memory before a GPU is used.
Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validate" . }}
*/}}
{{- define "megatron-training.validate" -}}
{{- include "megatron-training.validateVolume" . -}}
{{- include "megatron-training.validateModel" . -}}
{{- include "megatron-training.validateLayout" . -}}
{{- include "megatron-training.validateValues" . -}}
{{- include "megatron-training.validateSft" . -}}
{{- include "megatron-training.validateCheckpoint" . -}}
{{- include "megatron-training.validateFramework" . -}}
{{- include "megatron-training.validateName" . -}}
{{- include "megatron-training.validateCluster" . -}}
{{- end }}

{{/*
Check that there is a volume for each path that is not the address of a bucket. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateVolume" . }}
*/}}
{{- define "megatron-training.validateVolume" -}}
{{- $storage := .Values.storage -}}
{{- $settings := include "megatron-training.settings" . | fromJson -}}
{{- $jobs := or .Values.checkpoint.import.enabled .Values.checkpoint.export.enabled -}}
{{- $isBelow := contains (printf "\"%s/" $storage.mountPath) (toJson $settings) -}}
{{- if or $isBelow (and $jobs (empty $storage.checkpointPvcName)) }}
{{- include "tokenmill.validateClaimName" (dict "root" . "more" "\nOr train without a volume: storage.datasetPath and storage.checkpointPath may both be s3://BUCKET/PREFIX.") }}
{{- end }}
{{- $checkpoints := include "megatron-training.outputPath" (list . "checkpoints") -}}
{{- if contains "://" $checkpoints }}
{{- if .Values.checkpoint.export.enabled }}
{{- fail (printf "\ncheckpoint.export.enabled=true reads a directory on a volume, but storage.checkpointPath is %s.\nSet it to false, and export a copy of the checkpoint (docs/storage.md)." $checkpoints) }}
{{- end }}
{{- if and .Values.dataset.buildIndex.enabled (not .Values.dataset.cachePath) }}
{{- fail (printf "\ndataset.buildIndex.enabled=true writes the index next to the checkpoints, but storage.checkpointPath is %s, and each pod builds its own.\nSet it to false, or dataset.cachePath to a directory on a volume." $checkpoints) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Check that the model is complete. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateModel" . }}
*/}}
{{- define "megatron-training.validateModel" -}}
{{- $model := include "megatron-training.model" . | fromJson -}}
{{- range list "numLayers" "hiddenSize" "numAttentionHeads" }}
{{- if not (index $model .) }}
{{- fail (printf "\nmodel.size=custom needs model.custom.%s.\nSet at least numLayers, hiddenSize and numAttentionHeads, for example --set model.custom.numLayers=24 --set model.custom.hiddenSize=1024 --set model.custom.numAttentionHeads=16." .) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Check that the GPUs are a multiple of a model copy's, and the batch a multiple of the micro-batches of all copies. Input: $.
Output: nothing, or fails.
  {{ include "megatron-training.validateLayout" . }}
*/}}
{{- define "megatron-training.validateLayout" -}}
{{- $layout := include "megatron-training.layout" . | fromJson -}}
{{- $world := int64 $layout.world }}{{ $copy := int64 $layout.copy }}{{ $copies := int64 $layout.copies -}}
{{- $nodes := int64 .Values.training.nodes }}{{ $gpus := int64 .Values.training.gpusPerNode -}}
{{- $model := printf "tensor %d x pipeline %d x context %d = %d" (int64 $layout.tensor) (int64 $layout.pipeline) (int64 $layout.context) $copy -}}
{{- if mod $world $copy }}
{{- fail (printf "\ntraining.nodes=%d x training.gpusPerNode=%d = %d GPUs is not a multiple of the GPUs of one copy of the model %s, %s: %d / %d leaves a remainder of %d.\nSet training.nodes so that the GPUs are a multiple of %d, or change the values of parallelism.tensorModelParallelSize, .pipelineModelParallelSize and .contextParallelSize." $nodes $gpus $world (toString .Values.model.size) $model $world $copy (mod $world $copy) $copy) }}
{{- end }}
{{- $batch := int64 $layout.batch }}{{ $micro := int64 $layout.micro -}}
{{- $step := mul $copies (default 1 $micro) -}}
{{- if and $batch (mod $batch $step) }}
{{- $divisor := printf "data parallel %d (%d GPUs / (%s))" $copies $world $model -}}
{{- if $micro }}{{ $divisor = printf "training.microBatchSize=%d x %s = %d" $micro $divisor $step }}{{ end -}}
{{- fail (printf "\ntraining.globalBatchSize=%d is not divisible by %s: it leaves a remainder of %d.\nSet training.globalBatchSize to a multiple of %d, or remove it." $batch $divisor (mod $batch $step) $step) }}
{{- end }}
{{- end }}

{{/*
Refuse values that contradict each other. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateValues" . }}
*/}}
{{- define "megatron-training.validateValues" -}}
{{- $training := .Values.training -}}
{{- if and $training.saveInterval (gt (int64 $training.saveInterval) (int64 $training.iterations)) }}
{{- fail (printf "\ntraining.saveInterval=%d is above training.iterations=%d: the run would not save before its end.\nSet a lower interval, or remove it: the default is a tenth of the iterations." (int64 $training.saveInterval) (int64 $training.iterations)) }}
{{- end }}
{{- range $key, $value := .Values.master }}
{{- if and (not (kindIs "invalid" $value)) (ne $.Values.engine "pytorchjob") }}
{{- fail (printf "\nmaster.%s works only with engine=pytorchjob, but engine=%s: its pods have one template.\nRemove it, or set engine=pytorchjob." $key $.Values.engine) }}
{{- end }}
{{- end }}
{{- if and .Values.gang.minAvailable (ne .Values.engine "pytorchjob") }}
{{- fail (printf "\ngang.minAvailable=%d works only with engine=pytorchjob, but engine=%s.\nRemove it, and use kueue.queueName, which admits the pods of any engine together." (int64 .Values.gang.minAvailable) .Values.engine) }}
{{- end }}
{{- if gt (int64 (.Values.gang.minAvailable | default 0)) (int64 $training.nodes) }}
{{- fail (printf "\ngang.minAvailable=%d is more than training.nodes=%d: no pod would start.\nSet gang.minAvailable=%d." (int64 .Values.gang.minAvailable) (int64 $training.nodes) (int64 $training.nodes)) }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.network.hostNetwork }}
{{- fail "\nnetworkPolicy.enabled=true has no effect with network.hostNetwork=true: these pods use the node's own addresses.\nSet one of them to false." }}
{{- end }}
{{- $storage := .Values.storage -}}
{{- $directories := include "megatron-training.directories" . | fromJson -}}
{{- $outputMount := include "megatron-training.outputMount" . -}}
{{- include (ternary "tokenmill.validatePath" "tokenmill.validatePlace" (eq true .Values.sft.enabled)) (dict "key" "storage.datasetPath" "path" $directories.dataset "mount" $storage.mountPath) -}}
{{- include "tokenmill.validatePlace" (dict "key" "storage.checkpointPath" "path" $directories.checkpoints "mount" $outputMount) -}}
{{- /* Only the uploads of checkpoints take the events along. */}}
{{- include (ternary "tokenmill.validatePlace" "tokenmill.validatePath" (contains "://" $directories.checkpoints)) (dict "key" "storage.logsPath" "path" $directories.logs "mount" $outputMount) -}}
{{- range $key, $path := dict "checkpoint.loadPath" .Values.checkpoint.loadPath "checkpoint.import.path" .Values.checkpoint.import.path "checkpoint.export.path" .Values.checkpoint.export.path "dataset.cachePath" .Values.dataset.cachePath "storage.subPath" $storage.subPath "storage.checkpointSubPath" $storage.checkpointSubPath }}
{{- include "tokenmill.validatePath" (dict "key" $key "path" $path "mount" $outputMount) -}}
{{- end }}
{{- if kindIs "string" .Values.dataset.blend }}
{{- include "tokenmill.validatePath" (dict "key" "dataset.blend" "path" .Values.dataset.blend "mount" $storage.mountPath) -}}
{{- else }}
{{- range $key, $parts := .Values.dataset.blend }}
{{- if kindIs "slice" $parts }}
{{- range $parts }}{{ include "tokenmill.validatePlace" (dict "key" (printf "dataset.blend.%s" $key) "path" .path "mount" $storage.mountPath) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $training.phases }}
{{- if or .Values.dataset.blend .Values.sft.enabled }}
{{- fail "\ntraining.phases names the datasets of each phase, and contradicts dataset.blend and sft.enabled.\nRemove them." }}
{{- end }}
{{- if kindIs "string" $training.phases }}
{{- include "tokenmill.validatePath" (dict "key" "training.phases" "path" $training.phases "mount" $storage.mountPath) -}}
{{- else }}
{{- range $number, $phase := $training.phases }}
{{- range $phase.blend }}{{ include "tokenmill.validatePlace" (dict "key" (printf "training.phases[%d].blend" $number) "path" .path "mount" $storage.mountPath) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if not (or $directories.dataset .Values.dataset.blend $training.phases) }}
{{- fail "\nstorage.datasetPath and dataset.blend are both empty: a run needs a dataset.\nAdd --set storage.datasetPath=DIRECTORY, the directory of an output of dataset-preprocess on the volume." }}
{{- end }}
{{- include "tokenmill.validateMount" (dict "key" "storage.mountPath" "mount" $storage.mountPath) -}}
{{- include "tokenmill.validateMount" (dict "key" "storage.checkpointMountPath" "mount" $storage.checkpointMountPath) -}}
{{- if and $storage.checkpointPvcName (eq $storage.mountPath $storage.checkpointMountPath) }}
{{- fail (printf "\nstorage.mountPath and storage.checkpointMountPath are both %s: two PVCs need two mount paths.\nSet another storage.checkpointMountPath." $storage.mountPath) }}
{{- end }}
{{- end }}

{{/*
Check the values of a fine-tuning run. `tokenmill train` checks the tokenizer and the rows. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateSft" . }}
*/}}
{{- define "megatron-training.validateSft" -}}
{{- $sft := .Values.sft -}}
{{- if $sft.enabled }}
{{- if not $sft.promptFormat }}
{{- fail "\nsft.enabled=true needs sft.promptFormat: nemotron-nano-v2, nemotron-h-aligned or identity.\nAdd --set sft.promptFormat=FORMAT, or train with Megatron-Bridge on the output of dataset-pack, which has any chat template." }}
{{- end }}
{{- if eq $sft.promptFormat "default" }}
{{- fail "\nsft.promptFormat=default masks nothing: the run would train the questions, too.\nUse nemotron-nano-v2, nemotron-h-aligned or identity, or train with Megatron-Bridge on the output of dataset-pack." }}
{{- end }}
{{- if not $sft.tokenizerPath }}
{{- fail "\nsft.enabled=true needs sft.tokenizerPath: Megatron-LM tokenizes the conversations while it trains.\nAdd --set sft.tokenizerPath=DIRECTORY, a directory on the volume with the files of the model's tokenizer." }}
{{- end }}
{{- include "tokenmill.validatePath" (dict "key" "sft.tokenizerPath" "path" $sft.tokenizerPath "mount" .Values.storage.mountPath) }}
{{- if ne .Values.trainer.backend "nccl" }}
{{- fail (printf "\nsft.enabled=true needs trainer.backend=nccl, not %s: --sft packs conversations, which only Transformer Engine's attention can separate.\nSet trainer.backend=nccl and use GPUs." .Values.trainer.backend) }}
{{- end }}
{{- if .Values.dataset.buildIndex.enabled }}
{{- fail "\nsft.enabled=true and dataset.buildIndex.enabled=true contradict each other: --sft has no sample index.\nSet dataset.buildIndex.enabled=false." }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Refuse values that the program of another framework cannot do. `tokenmill train` checks the model and the recipe. Input: $.
Output: nothing, or fails.
  {{ include "megatron-training.validateFramework" . }}
*/}}
{{- define "megatron-training.validateFramework" -}}
{{- $framework := .Values.trainer.framework | default "megatron-lm" -}}
{{- if ne $framework "megatron-lm" }}
{{- $layout := include "megatron-training.layout" . | fromJson -}}
{{- if gt (int64 $layout.copy) 1 }}
{{- fail (printf "\ntrainer.framework=%s has only data parallelism, but the model has tensor %d x pipeline %d x context %d.\nSet parallelism.tensorModelParallelSize=1, .pipelineModelParallelSize=1 and .contextParallelSize=1, or trainer.framework=megatron-lm." $framework (int64 $layout.tensor) (int64 $layout.pipeline) (int64 $layout.context)) }}
{{- end }}
{{- if .Values.sft.enabled }}
{{- fail (printf "\ntrainer.framework=%s does not read conversations, but sft.enabled=true.\nSet sft.enabled=false, or trainer.framework=megatron-lm." $framework) }}
{{- end }}
{{- range list "import" "export" }}
{{- if (get $.Values.checkpoint .).enabled }}
{{- fail (printf "\ntrainer.framework=%s has its own format of checkpoints, but checkpoint.%s.enabled=true.\nSet checkpoint.%s.enabled=false, or trainer.framework=megatron-lm." $framework . .) }}
{{- end }}
{{- end }}
{{- if .Values.dataset.buildIndex.enabled }}
{{- fail (printf "\ntrainer.framework=%s needs no sample index, but dataset.buildIndex.enabled=true.\nSet dataset.buildIndex.enabled=false." $framework) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Check that the names of pods and services, which the engine derives from the release name, are DNS labels. Input: $.
Output: nothing, or fails.
  {{ include "megatron-training.validateName" . }}
*/}}
{{- define "megatron-training.validateName" -}}
{{- $release := .Release.Name -}}
{{- $last := sub (int64 .Values.training.nodes) 1 -}}
{{- $names := list (printf "%s-node-0-%d-xxxxx" $release $last) -}}
{{- if eq .Values.engine "pytorchjob" }}{{ $names = list (ternary (printf "%s-worker-%d" $release (sub $last 1)) (printf "%s-master-0" $release) (gt $last 0)) }}{{ end -}}
{{- if eq (include "megatron-training.hasTensorboard" .) "true" }}{{ $names = append $names (include "megatron-training.tensorboardName" .) }}{{ end -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $release) }}
{{- fail (printf "\nthe release name %q is not a valid name of a %s: it must begin with a letter and must not contain dots; choose another name, such as %q." $release (include "megatron-training.engine" .Values.engine | fromYaml).kind (printf "run-%s" (replace "." "-" $release))) }}
{{- end }}
{{- range $names }}
{{- if gt (len .) 63 }}
{{- fail (printf "\nthe release name %q is too long: it results in the name %q with %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." $release . (len .) (sub (len .) 63)) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Check the objects of the cluster, if this render can read it: it must have the engine's API, and no run of the same release
under another engine. Such a run would continue for its grace period and overwrite checkpoints of the new run.
Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateCluster" . }}
*/}}
{{- define "megatron-training.validateCluster" -}}
{{- $engine := include "megatron-training.engine" .Values.engine | fromYaml -}}
{{- $storage := .Values.storage -}}
{{- if eq (include "tokenmill.connected" .) "true" }}
{{- if not (.Capabilities.APIVersions.Has (printf "%s/%s" $engine.apiVersion $engine.kind)) }}
{{- $operators := dict "pytorchjob" "Kubeflow's training operator" "jobset" "JobSet" "trainjob" "Kubeflow Trainer 2" -}}
{{- $available := list -}}
{{- range $name := keys $operators | sortAlpha }}
{{- $other := include "megatron-training.engine" $name | fromYaml }}
{{- if $.Capabilities.APIVersions.Has (printf "%s/%s" $other.apiVersion $other.kind) }}{{ $available = append $available (printf "--set engine=%s" $name) }}{{ end }}
{{- end }}
{{- fail (printf "\nengine=%s needs %s, but this cluster does not have the API of %s, %s.\nInstall it, or use an engine that the cluster has: %s." .Values.engine (index $operators .Values.engine) $engine.kind $engine.apiVersion (join ", " $available | default "none")) }}
{{- end }}
{{- $runs := (lookup "v1" "ConfigMap" .Release.Namespace (include "megatron-training.runConfigMapName" .)).data }}
{{- if and $runs (ne $runs.engine .Values.engine) }}
{{- $other := (include "megatron-training.engine" $runs.engine | fromYaml).kind }}
{{- fail (printf "\nthe release %s runs as a %s: engine=%s would start a second run on its checkpoints while the first one ends.\nRun helm uninstall %s -n %s --wait, and install again when its pods are gone. The run resumes from the last checkpoint." .Release.Name $other .Values.engine .Release.Name .Release.Namespace) }}
{{- end }}
{{- $secret := ternary .Values.checkpoint.import.tokenSecret.name "" (eq true .Values.checkpoint.import.enabled) }}
{{- if and $secret (ne (toJson .Values.checkCluster) "false") (not (lookup "v1" "Secret" .Release.Namespace $secret)) }}
{{- fail (printf "\ncheckpoint.import.tokenSecret.name: there is no Secret %q in namespace %s, and the import would wait for it forever.\nCreate it, or name another one: kubectl get secret -n %s" $secret .Release.Namespace .Release.Namespace) }}
{{- end }}
{{- if ne (toJson .Values.checkCluster) "false" }}
{{- include "tokenmill.validateKey" (dict "root" . "setting" "checkpoint.import.tokenSecret.key" "kind" "Secret" "name" $secret "key" .Values.checkpoint.import.tokenSecret.key) }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateCluster" (merge (dict "root" . "name" .Release.Name
      "claims" (dict "storage.pvcName" $storage.pvcName "storage.checkpointPvcName" $storage.checkpointPvcName)) $engine) -}}
{{- end }}
