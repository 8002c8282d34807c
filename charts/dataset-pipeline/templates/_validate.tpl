{{/*
What the schema cannot say, of the pipeline as a whole; then what each stage's own chart checks. Input: $. Output:
nothing, or the render fails.
  {{ include "dataset-pipeline.validate" . }}
*/}}
{{- define "dataset-pipeline.validate" -}}
{{- $values := .Values -}}
{{- $stages := .Files.Get "stages.yaml" | fromYamlArray -}}
{{- $enabled := list }}{{ range $stages }}{{ $enabled = append $enabled (index $values .).enabled }}{{ end }}
{{- if not (has true $enabled) }}
{{- fail (printf "\nno stage is enabled: %s and %s are all off.\nAdd --set preprocess.enabled=true, or those that you want." (initial $stages | join ", ") (last $stages)) }}
{{- end }}
{{- if not $values.dataset.root }}
{{- fail "\ndataset.root is not set: it is the dataset's directory on the volume, below which each stage reads and writes.\nAdd --set dataset.root=DIRECTORY, such as slimpajama, or a file of values/datasets." }}
{{- end }}
{{- range $stage := .Files.Get "stages.yaml" | fromYamlArray }}
{{- if (index $values $stage).enabled }}
{{- if and $values.preprocess.enabled $values.preprocess.dataset.stream (ne $stage "preprocess") }}
{{- fail (printf "\npreprocess.dataset.stream=true fetches the shards itself, and %s.enabled=true would keep them on the volume.\nAdd --set %s.enabled=false, or leave out the former." $stage $stage) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateClaimName" . -}}
{{- include "tokenmill.validatePath" (dict "key" "dataset.root" "path" $values.dataset.root "mount" $values.storage.mountPath) -}}
{{- include "dataset-pipeline.validateName" . -}}
{{- include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.validateStage") -}}
{{- include "dataset-pipeline.validateCluster" . -}}
{{- end }}

{{/*
One stage: its own values, and that it reads what the one before it writes. Input: the stage's dict, see
dataset-pipeline.each. Output: nothing, or fails.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.validateStage") }}
*/}}
{{- define "dataset-pipeline.validateStage" -}}
{{- include "tokenmill.validateStage" . -}}
{{- $reads := include "tokenmill.directories" . | fromYaml -}}
{{- with .previous -}}
{{- $from := list .storage.pvcName .storage.subPath -}}
{{- if .storage.outputPvcName }}{{ $from = list .storage.outputPvcName .storage.outputSubPath }}{{ end -}}
{{- $to := list $.root.Values.storage.pvcName $.root.Values.storage.subPath -}}
{{- if ne (toJson $from) (toJson $to) }}
{{- fail (printf "\n%s writes to the claim %s, and %s reads from the claim %s.\nSet %s.storage.pvcName and .subPath to where %s writes, or leave out its storage.outputPvcName." $.before (join "/" (compact $from)) $.stage (join "/" (compact $to)) $.stage $.before) }}
{{- end }}
{{- $root := .dataset.root | trimSuffix "/" -}}
{{- $wrote := .dataset.outputPath | default "" | trimSuffix "/" -}}
{{- $read := $reads.reads | trimSuffix "/" -}}
{{- if and $wrote (not (hasPrefix (printf "%s/" $read) (printf "%s/" $wrote))) }}
{{- fail (printf "\n%s.dataset.outputPath=%s lies outside what %s reads, %s.\nAdd --set %s.dataset.inputPath=%s, or choose a directory below %s." $.before $wrote $.stage $read $.stage $wrote $read) }}
{{- end }}
{{- if and (not $wrote) (eq $.before "download") (not (hasPrefix (printf "%s/" $root) (printf "%s/" $read))) (not (hasPrefix (printf "%s/" $read) (printf "%s/" $root))) }}
{{- fail (printf "\ndownload writes to dataset.root=%s, and %s.dataset.inputPath=%s is not there.\nLeave the latter out; or, to read what is there already, add --set download.enabled=false." $root $.stage $read) }}
{{- end }}
{{- end -}}
{{- end }}

{{/*
The longest pod is named RELEASE-STAGE-0-INDEX-xxxxx, and a Job is a DNS label that begins with a letter. Input: $.
Output: nothing, or fails.
  {{ include "dataset-pipeline.validateName" . }}
*/}}
{{- define "dataset-pipeline.validateName" -}}
{{- $release := .Release.Name -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $release) }}
{{- fail (printf "\nthe release name %q cannot be that of a JobSet, which begins with a letter and has no dot; choose another, such as %q." $release (printf "corpus-%s" (replace "." "-" $release))) }}
{{- end }}
{{- $longest := "" -}}
{{- range include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.lastPod") | trim | splitList " " }}
{{- if gt (len .) (len $longest) }}{{ $longest = . }}{{ end }}
{{- end }}
{{- if gt (len $longest) 63 }}
{{- fail (printf "\nthe release name %q is too long: a pod would be %q, %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." $release $longest (len $longest) (sub (len $longest) 63)) }}
{{- end }}
{{- end }}

{{/*
The name of a stage's last pod, after a space. Input: the stage's dict. Output: a name.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.lastPod") }}
*/}}
{{- define "dataset-pipeline.lastPod" }} {{ .root.Release.Name }}
{{- ternary "-01234567" "" (eq .root.Values.job.naming "hash") }}-{{ .stage }}-0-{{ sub (int64 .root.Values.workers) 1 }}-xxxxx
{{- end }}

{{/*
What the cluster must have, where this render can see it. Input: $. Output: nothing, or fails.
  {{ include "dataset-pipeline.validateCluster" . }}
*/}}
{{- define "dataset-pipeline.validateCluster" -}}
{{- $kind := dict "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" -}}
{{- if eq (include "tokenmill.connected" .) "true" }}
{{- if not (.Capabilities.APIVersions.Has (printf "%s/%s" $kind.apiVersion $kind.kind)) }}
{{- fail (printf "\nthis cluster knows no JobSet of %s.\nInstall JobSet (https://jobset.sigs.k8s.io), or install the stages one after the other: examples/deploy.sh." $kind.apiVersion) }}
{{- end }}
{{- $claims := dict "storage.pvcName" .Values.storage.pvcName "storage.outputPvcName" .Values.storage.outputPvcName -}}
{{- range $stage := .Files.Get "stages.yaml" | fromYamlArray }}
{{- $section := index $.Values $stage }}
{{- if $section.enabled }}
{{- range $key := list "pvcName" "outputPvcName" }}
{{- $_ := set $claims (printf "%s.storage.%s" $stage $key) (get ($section.storage | default dict) $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateCluster" (merge (dict "root" . "name" (include "dataset-pipeline.name" .) "claims" $claims) $kind) -}}
{{- end }}
{{- end }}
