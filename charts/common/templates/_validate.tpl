{{/*
What the schema cannot say: facts about names and several keys at once, and messages a person can act on. The schema
runs first and owns types, ranges and unknown keys; what the data means is the command's to judge.
Input: the stage's dict, see tokenmill.stage. Output: nothing; the render fails with a message.
  {{ include "tokenmill.validate" . }}
*/}}
{{- define "tokenmill.validate" -}}
{{- $storage := .root.Values.storage -}}
{{- include "tokenmill.validateName" . -}}
{{- include "tokenmill.validateClaimName" .root -}}
{{- include "tokenmill.validateStage" . -}}
{{- include "tokenmill.validateCluster" (dict "root" .root "apiVersion" "batch/v1" "kind" "Job" "name" (include "tokenmill.jobName" .)
      "claims" (dict "storage.pvcName" $storage.pvcName "storage.outputPvcName" $storage.outputPvcName)) -}}
{{- end }}

{{/*
What holds for a stage's own values. Input: the stage's dict, and "section", where these values are a section of a
chart's: `preprocess.`, which keys in messages then begin with. Output: nothing, or fails.
  {{ include "tokenmill.validateStage" . }}
*/}}
{{- define "tokenmill.validateStage" -}}
{{- $storage := .root.Values.storage -}}
{{- $found := include "tokenmill.directories" . | fromYaml -}}
{{- $in := .section | default "" -}}
{{- include "tokenmill.validateSource" (.source | default "") -}}
{{- with .root.Values.job.maxFailedIndexes }}
{{- if gt (int64 .) (int64 $.root.Values.workers) }}
{{- fail (printf "\n%sjob.maxFailedIndexes=%d is more than workers=%d.\nLeave it out, or lower it." $in (int64 .) (int64 $.root.Values.workers)) }}
{{- end }}
{{- end }}
{{- if and (not .source) (not $found.reads) }}
{{- fail (printf "\n%sdataset.inputPath is not set: it is the directory on the volume that %s reads, such as slimpajama.\nAdd --set %sdataset.inputPath=DIRECTORY." $in .stage $in) }}
{{- end }}
{{- if and (not $found.writes) $storage.outputPvcName }}
{{- fail (printf "\n%sstorage.outputPvcName is set and %sdataset.outputPath is not: it is the directory on that second volume to write to.\nAdd --set %sdataset.outputPath=DIRECTORY." $in $in $in) }}
{{- end }}
{{- if and (not $found.writes) .source }}
{{- fail (printf "\n%sdataset.outputPath is not set: it is the directory on the volume that %s writes to, such as slimpajama.\nAdd --set %sdataset.outputPath=DIRECTORY." $in .stage $in) }}
{{- end }}
{{- range $key, $mount := dict "storage.mountPath" $storage.mountPath "storage.outputMountPath" $storage.outputMountPath }}
{{- include "tokenmill.validateMount" (dict "key" (print $in $key) "mount" $mount) -}}
{{- end }}
{{- range $key, $path := dict "dataset.inputPath" $found.reads "dataset.outputPath" $found.writes "storage.subPath" $storage.subPath "storage.outputSubPath" $storage.outputSubPath }}
{{- include "tokenmill.validatePath" (dict "key" (print $in $key) "path" $path "mount" $storage.mountPath) -}}
{{- end }}
{{- end }}

{{/*
An address is seen by everybody who may look at the Job, or at the release: it holds no password, and no signature. Of a
password with a slash, what looks like a port is the beginning. Input: an URI, or nothing. Output: nothing, or fails.
  {{ include "tokenmill.validateSource" "https://example.com/corpus.jsonl.zst" }}
*/}}
{{- define "tokenmill.validateSource" -}}
{{- $first := "(?i)^[a-z0-9+.-]+://[^/?#@:]*:" -}}
{{- $password := list (print $first "[^/?#]*@") (print $first "[0-9]*[^0-9/?#@][^@]*@") "(?i)^https?://[^/?#]*@" "(?i)^(hf|s3|gs|az|abfs)://[^/?#]*:[^@]*@" -}}
{{- if regexMatch (join "|" $password) . }}
{{- fail "\ndataset.source holds a password, which would be seen in the Job and in logs.\nTake it out, and give credentials by serviceAccount or by extraEnv with a secretKeyRef." }}
{{- end }}
{{- if regexMatch "(?i)[?&](sig|signature|x-amz-signature|x-amz-security-token|x-goog-signature|token|access_token)=" . }}
{{- fail "\ndataset.source holds a signature, which would be seen in the Job.\nTake it out, and give credentials by serviceAccount or by extraEnv with a secretKeyRef: AZURE_STORAGE_SAS_TOKEN for az://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://." }}
{{- end }}
{{- end }}

{{/*
The claim must have a name. Input: $. Output: nothing, or fails.
  {{ include "tokenmill.validateClaimName" . }}
*/}}
{{- define "tokenmill.validateClaimName" -}}
{{- if not .Values.storage.pvcName }}
{{- fail (printf "\nstorage.pvcName is not set: it names the claim that holds the data.\nAdd --set storage.pvcName=NAME; `kubectl get pvc -n %s` lists the claims, and charts/shared-storage makes one." .Release.Namespace) }}
{{- end }}
{{- end }}

{{/*
A volume hides nothing of the image or of the pod. Input: dict "key" "mount". Output: nothing, or fails.
  {{ include "tokenmill.validateMount" (dict "key" "storage.mountPath" "mount" "/data") }}
*/}}
{{- define "tokenmill.validateMount" -}}
{{- if has (index (splitList "/" .mount) 1) (list "bin" "dev" "etc" "lib" "lib64" "opt" "proc" "sbin" "scratch" "sys" "usr") }}
{{- fail (printf "\n%s=%q lies where the image or the pod has files of its own; choose another place, such as /data." .key .mount) }}
{{- end }}
{{- end }}

{{/*
What the cluster must have, and must not have, where this render can see it: pods that wait for a claim, a ConfigMap or an
account wait for ever and say so nowhere but in their events. Input: dict "root", "apiVersion" "kind" "name" of what runs,
and "claims": dict of key to claim. Helm ends a render where a look-up is forbidden, and no template can catch that: what a
person needs no right to for the installation itself is looked up only with `checkCluster`. Output: nothing, or fails.
  {{ include "tokenmill.validateCluster" (dict "root" . "apiVersion" "batch/v1" "kind" "Job" "name" "x" "claims" (dict "storage.pvcName" "x")) }}
*/}}
{{- define "tokenmill.validateCluster" -}}
{{- if eq (include "tokenmill.connected" .root) "true" }}
{{- $found := include "tokenmill.found" . | fromYaml }}
{{- if and $found (ne (index ($found.metadata.annotations | default dict) "meta.helm.sh/release-name") .root.Release.Name) }}
{{- fail (printf "\nthere is a %s %q in namespace %s that is not of this release; choose another release name." .kind .name .root.Release.Namespace) }}
{{- end }}
{{- if and $found $found.metadata.deletionTimestamp }}
{{- fail (printf "\nthe %s %q is still being deleted, and what is installed now would go with it.\nWait for it: kubectl wait --for=delete %s/%s -n %s --timeout=5m" .kind .name (lower .kind) .name .root.Release.Namespace) }}
{{- end }}
{{- if ne (toJson .root.Values.checkCluster) "false" }}
{{- range $key, $claim := .claims }}
{{- $there := dict }}
{{- if $claim }}{{ $there = lookup "v1" "PersistentVolumeClaim" $.root.Release.Namespace $claim }}{{ end }}
{{- if ($there.metadata).deletionTimestamp }}
{{- fail (printf "\n%s: the PersistentVolumeClaim %q is being deleted, and no new pod gets it.\nWait until it is gone (kubectl wait --for=delete pvc/%s -n %s --timeout=5m) and make it again, or name another: kubectl get pvc -n %s" $key $claim $claim $.root.Release.Namespace $.root.Release.Namespace) }}
{{- end }}
{{- if and $claim (not $there) }}
{{- fail (printf "\n%s: there is no PersistentVolumeClaim %q in namespace %s, and the pods would wait for it for ever.\nMake it: helm install shared-storage charts/shared-storage -n %s --set pvc.name=%s\nOr name another: kubectl get pvc -n %s" $key $claim $.root.Release.Namespace $.root.Release.Namespace $claim $.root.Release.Namespace) }}
{{- end }}
{{- end }}
{{- $environment := .root.Values.environment.configMap -}}
{{- if and $environment (eq (include "tokenmill.mayBeAbsent" $environment) "false") (not (lookup "v1" "ConfigMap" .root.Release.Namespace $environment)) }}
{{- fail (printf "\nenvironment.configMap: there is no ConfigMap %q in namespace %s, and its entries would be missing from the pods' environment.\nCreate it, or name another (kubectl get configmaps -n %s), or none: --set environment.configMap=" $environment .root.Release.Namespace .root.Release.Namespace) }}
{{- end }}
{{- $ca := .root.Values.environment.caBundle.configMap -}}
{{- if and $ca (not (lookup "v1" "ConfigMap" .root.Release.Namespace $ca)) }}
{{- fail (printf "\nenvironment.caBundle.configMap: there is no ConfigMap %q in namespace %s, and the pods would wait for it for ever.\nCreate it: kubectl create configmap %s -n %s --from-file=%s" $ca .root.Release.Namespace $ca .root.Release.Namespace .root.Values.environment.caBundle.key) }}
{{- end }}
{{- $values := .root.Values }}
{{- $account := ternary "" $values.serviceAccount.name (eq true $values.serviceAccount.create) }}
{{- range list (list "hub.tokenSecret.name" "Secret" (($values.hub).tokenSecret).name) (list "serviceAccount.name" "ServiceAccount" $account) }}
{{- if and (last .) (not (lookup "v1" (index . 1) $.root.Release.Namespace (last .))) }}
{{- fail (printf "\n%s: there is no %s %q in namespace %s, and the pods would wait for it for ever.\nCreate it, or name another: kubectl get %s -n %s" (first .) (index . 1) (last .) $.root.Release.Namespace (lower (index . 1)) $.root.Release.Namespace) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
A pod of an Indexed Job has the hostname <job>-<index>, a DNS label. Input: the stage's dict. Output: nothing, or fails.
  {{ include "tokenmill.validateName" . }}
*/}}
{{- define "tokenmill.validateName" -}}
{{- $name := include "tokenmill.jobName" . -}}
{{- $last := printf "%s-%d" $name (sub (int64 .root.Values.workers) 1) -}}
{{- if contains "." $name }}
{{- fail (printf "\nthe release name %q has a dot, which a Job with indices cannot have in its name; choose another, such as %q." .root.Release.Name (replace "." "-" .root.Release.Name)) }}
{{- end }}
{{- if gt (len $last) 63 }}
{{- fail (printf "\nthe release name %q is too long: its last pod would be %q, %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." .root.Release.Name $last (len $last) (sub (len $last) 63)) }}
{{- end }}
{{- end }}

{{/*
A path on a volume is relative to it and stays in it. Input: dict "key" "path" "mount". Output: nothing, or fails.
  {{ include "tokenmill.validatePath" (dict "key" "dataset.inputPath" "path" "slimpajama" "mount" "/data") }}
*/}}
{{- define "tokenmill.validatePath" -}}
{{- if hasPrefix "/" (.path | default "") }}
{{- fail (printf "\n%s=%q begins with a slash: it is relative to the volume, which the pod sees at %s.\nGive a path such as %q." .key .path .mount (trimPrefix "/" (trimPrefix .mount .path))) }}
{{- end }}
{{- range splitList "/" (.path | default "") }}
{{- if has . (list "." "..") }}
{{- fail (printf "\n%s=%q contains %q: a path must stay inside the volume.\nGive a path below its root, such as slimpajama/preprocessed." $.key $.path .) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
What to say where files of a chart are missing that it reaches by a symbolic link in Git. Flux's source-controller and some
archives leave links out. Input: what is missing, in the chart. Output: none, the render fails.
  {{ include "tokenmill.missing" "models" }}
*/}}
{{- define "tokenmill.missing" -}}
{{- fail (printf "\nthis copy of the chart has no %s: it is a symbolic link in Git, which Flux's GitRepository, and a checkout or an archive without symbolic links, leave out.\nUse the packaged chart, which has it as a file: helm install RELEASE oci://REGISTRY/CHART, in Flux an OCIRepository or a HelmRepository (docs/pipeline.md); or helm package it in a clone with links." .) }}
{{- end }}
