{{/*
Check the values of the pipeline for rules that the schema cannot express, then the values of each stage as its own chart
does. Input: $. Output: nothing, or the render fails.
  {{ include "dataset-pipeline.validate" . }}
*/}}
{{- define "dataset-pipeline.validate" -}}
{{- $values := .Values -}}
{{- $stages := list }}{{ $enabled := list -}}
{{- range .Files.Get "stages.yaml" | fromYamlArray }}{{ $stages = append $stages .name }}{{ $enabled = append $enabled (index $values .name).enabled }}{{ end }}
{{- if not (has true $enabled) }}
{{- fail (printf "\nno stage is enabled: %s and %s are all disabled.\nAdd --set preprocess.enabled=true, or enable the stages that you need." (initial $stages | join ", ") (last $stages)) }}
{{- end }}
{{- if not $values.dataset.root }}
{{- fail "\ndataset.root is not set: it must name the dataset's directory on the volume, in which each stage reads and writes.\nAdd --set dataset.root=DIRECTORY, such as slimpajama, or -f with a file of values/datasets." }}
{{- end }}
{{- with $values.kueue.minWorkers }}
{{- fail (printf "\nkueue.minWorkers=%d works only for the chart of a single stage: Kueue admits a JobSet as a whole.\nRemove it, or install the stages one after the other (examples/deploy.sh)." (int64 .)) }}
{{- end }}
{{- include "tokenmill.validatePlace" (dict "key" "dataset.root" "path" $values.dataset.root "mount" $values.storage.mountPath) -}}
{{- include "dataset-pipeline.validateName" . -}}
{{- include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.validateStage") -}}
{{- include "dataset-pipeline.validateCluster" . -}}
{{- end }}

{{/*
Check one stage: its own values, and that it reads the output of the stage before it. Input: the stage's dict, see
dataset-pipeline.forEachStage. Output: nothing, or fails.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.validateStage") }}
*/}}
{{- define "dataset-pipeline.validateStage" -}}
{{- if and .previousStage .root.Values.dataset.stream }}
{{- fail (printf "\n%s.dataset.stream=true and %s.enabled=true contradict each other: a stream reads the source, not the output of a stage.\nAdd --set %s.enabled=false, or remove %s.dataset.stream." .stage .previousStage .previousStage .stage) }}
{{- end }}
{{- include "tokenmill.validateStage" . -}}
{{- $directories := include "tokenmill.directories" . | fromYaml -}}
{{- with ternary .previousValues dict (empty .source) -}}
{{- $previousClaim := list .storage.pvcName .storage.subPath -}}
{{- if .storage.outputPvcName }}{{ $previousClaim = list .storage.outputPvcName .storage.outputSubPath }}{{ end -}}
{{- $ownClaim := list $.root.Values.storage.pvcName $.root.Values.storage.subPath -}}
{{- if ne (toJson $previousClaim) (toJson $ownClaim) }}
{{- fail (printf "\n%s writes to the PVC %s, but %s reads from the PVC %s.\nSet %s.storage.pvcName and .subPath to the PVC that %s writes to, or remove its storage.outputPvcName." $.previousStage (join "/" (compact $previousClaim)) $.stage (join "/" (compact $ownClaim)) $.stage $.previousStage) }}
{{- end }}
{{- $root := .dataset.root | trimSuffix "/" -}}
{{- $previousOutput := .dataset.outputPath | default "" | trimSuffix "/" -}}
{{- $input := $directories.reads | trimSuffix "/" -}}
{{- if and $previousOutput (not (hasPrefix (printf "%s/" $input) (printf "%s/" $previousOutput))) }}
{{- fail (printf "\n%s.dataset.outputPath=%s is outside of the directory that %s reads, %s.\nAdd --set %s.dataset.inputPath=%s, or choose a directory below %s." $.previousStage $previousOutput $.stage $input $.stage $previousOutput $input) }}
{{- end }}
{{- if and (not $previousOutput) (eq $.previousStage "download") (not (hasPrefix (printf "%s/" $root) (printf "%s/" $input))) (not (hasPrefix (printf "%s/" $input) (printf "%s/" $root))) }}
{{- fail (printf "\ndownload writes to dataset.root=%s, but %s.dataset.inputPath=%s is outside of it.\nRemove the latter; or, to read existing data, add --set download.enabled=false." $root $.stage $input) }}
{{- end }}
{{- end -}}
{{- end }}

{{/*
Check the release name: the longest pod is named RELEASE-STAGE-0-INDEX-xxxxx, and the name of a Job is a DNS label that
begins with a letter. Input: $. Output: nothing, or fails.
  {{ include "dataset-pipeline.validateName" . }}
*/}}
{{- define "dataset-pipeline.validateName" -}}
{{- $release := .Release.Name -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $release) }}
{{- fail (printf "\nthe release name %q is not a valid name of a JobSet: it must begin with a letter and must not contain dots; choose another name, such as %q." $release (printf "corpus-%s" (replace "." "-" $release))) }}
{{- end }}
{{- $longest := "" -}}
{{- range include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.lastPod") | trim | splitList " " }}
{{- if gt (len .) (len $longest) }}{{ $longest = . }}{{ end }}
{{- end }}
{{- if gt (len $longest) 63 }}
{{- fail (printf "\nthe release name %q is too long: the name of a pod would be %q with %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." $release $longest (len $longest) (sub (len $longest) 63)) }}
{{- end }}
{{- end }}

{{/*
Return the name of a stage's last pod, after a space. Input: the stage's dict. Output: a name.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.lastPod") }}
*/}}
{{- define "dataset-pipeline.lastPod" }} {{ .root.Release.Name }}
{{- ternary "-01234567" "" (eq .root.Values.job.naming "hash") }}-{{ .stage }}-0-{{ sub (int64 .root.Values.workers) 1 }}-xxxxx
{{- end }}

{{/*
Check the objects that the cluster must have, if this render can read the cluster. Input: $. Output: nothing, or fails.
  {{ include "dataset-pipeline.validateCluster" . }}
*/}}
{{- define "dataset-pipeline.validateCluster" -}}
{{- $kind := dict "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" -}}
{{- if eq (include "tokenmill.connected" .) "true" }}
{{- if not (.Capabilities.APIVersions.Has (printf "%s/%s" $kind.apiVersion $kind.kind)) }}
{{- fail (printf "\nthis cluster does not have the API of JobSet, %s.\nInstall JobSet (https://jobset.sigs.k8s.io), or install the stages one after the other (examples/deploy.sh)." $kind.apiVersion) }}
{{- end }}
{{- $claims := dict "storage.pvcName" .Values.storage.pvcName "storage.outputPvcName" .Values.storage.outputPvcName -}}
{{- range .Files.Get "stages.yaml" | fromYamlArray }}
{{- $stage := .name }}{{ $section := index $.Values $stage }}
{{- if $section.enabled }}
{{- range $key := list "pvcName" "outputPvcName" }}
{{- $_ := set $claims (printf "%s.storage.%s" $stage $key) (get ($section.storage | default dict) $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateCluster" (merge (dict "root" . "name" (include "dataset-pipeline.name" .) "claims" $claims) $kind) -}}
{{- end }}
{{- end }}
