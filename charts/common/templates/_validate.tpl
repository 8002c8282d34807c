{{/*
Check a stage's values for rules that the schema cannot express: names, several keys at once, and the state of the
cluster. The schema runs before the templates and checks types, ranges and unknown keys. The command checks the data.
Input: the stage's dict, see tokenmill.stage. Output: nothing; the render fails with a message.
  {{ include "tokenmill.validate" . }}
*/}}
{{- define "tokenmill.validate" -}}
{{- $storage := .root.Values.storage -}}
{{- include "tokenmill.validateName" . -}}
{{- include "tokenmill.validateStage" . -}}
{{- with .root.Values.kueue.minWorkers }}
{{- if ge (int64 .) (int64 $.root.Values.workers) }}
{{- fail (printf "\nkueue.minWorkers=%d is not below workers=%d: it is the number of workers with which the Job may start instead of all.\nSet a lower number, or remove it." (int64 .) (int64 $.root.Values.workers)) }}
{{- end }}
{{- end }}
{{- include "tokenmill.validateCluster" (dict "root" .root "apiVersion" "batch/v1" "kind" "Job" "name" (include "tokenmill.jobName" .)
      "claims" (dict "storage.pvcName" $storage.pvcName "storage.outputPvcName" $storage.outputPvcName)) -}}
{{- end }}

{{/*
Check a stage's own values. Input: the stage's dict, and "section" if these values are a section of another chart:
`preprocess.`, the prefix of keys in messages. Output: nothing, or fails.
  {{ include "tokenmill.validateStage" . }}
*/}}
{{- define "tokenmill.validateStage" -}}
{{- $storage := .root.Values.storage -}}
{{- $directories := include "tokenmill.directories" . | fromYaml -}}
{{- $section := .section | default "" -}}
{{- include "tokenmill.validateSource" (dict "key" "dataset.source" "source" (.source | default "")) -}}
{{- include "tokenmill.validateFiles" . -}}
{{- with .root.Values.job.maxFailedIndexes }}
{{- if gt (int64 .) (int64 $.root.Values.workers) }}
{{- fail (printf "\n%sjob.maxFailedIndexes=%d is more than workers=%d: there are no more indexes than workers.\nRemove it, or set a lower number." $section (int64 .) (int64 $.root.Values.workers)) }}
{{- end }}
{{- end }}
{{- if and (not .source) (not $directories.reads) }}
{{- fail (printf "\n%sdataset.inputPath is not set: %s must have a directory on the volume to read, such as slimpajama.\nAdd --set %sdataset.inputPath=DIRECTORY." $section .stage $section) }}
{{- end }}
{{- if and (not $directories.writes) $storage.outputPvcName }}
{{- fail (printf "\n%sstorage.outputPvcName is set but %sdataset.outputPath is not: a second volume needs a directory to write to.\nAdd --set %sdataset.outputPath=DIRECTORY." $section $section $section) }}
{{- end }}
{{- if and (not $directories.writes) .source }}
{{- fail (printf "\n%sdataset.outputPath is not set: %s must have a directory on the volume to write to, such as slimpajama.\nAdd --set %sdataset.outputPath=DIRECTORY." $section .stage $section) }}
{{- end }}
{{- range $key, $mount := dict "storage.mountPath" $storage.mountPath "storage.outputMountPath" $storage.outputMountPath }}
{{- include "tokenmill.validateMount" (dict "key" (print $section $key) "mount" $mount) -}}
{{- end }}
{{- range $key, $path := dict "dataset.inputPath" $directories.reads "dataset.outputPath" $directories.writes }}
{{- include "tokenmill.validatePlace" (dict "key" (print $section $key) "path" $path "mount" $storage.mountPath) -}}
{{- end }}
{{- range $key, $path := dict "storage.subPath" $storage.subPath "storage.outputSubPath" $storage.outputSubPath }}
{{- include "tokenmill.validatePath" (dict "key" (print $section $key) "path" $path "mount" $storage.mountPath) -}}
{{- end }}
{{- if eq (include "tokenmill.needsVolume" .) "true" }}{{ include "tokenmill.validateClaimName" (dict "root" .root "more" "\nOr read and write buckets: dataset.root, inputPath and outputPath may be s3://BUCKET/PREFIX.") }}{{ end }}
{{- end }}

{{/*
Return whether an argument of a stage, or a path in its files, is below the mount path of a volume. Input: the stage's dict.
Output: true or false.
  {{ include "tokenmill.needsVolume" . }}
*/}}
{{- define "tokenmill.needsVolume" -}}
{{- $storage := .root.Values.storage -}}
{{- $texts := append (values (.files | default dict)) (include "tokenmill.arguments" .) | join " " -}}
{{- $mounts := list (regexQuoteMeta $storage.mountPath) (regexQuoteMeta $storage.outputMountPath) | join "|" -}}
{{ regexMatch (printf "[\"=\\s](%s)/" $mounts) $texts }}
{{- end }}

{{/*
Refuse an address with a password or a signature: every user with read access to the Job or the release could read it. If
a password contains a slash, its first part looks like a port. Input: dict "key" "source" a URI, or "". Output: nothing, or fails.
  {{ include "tokenmill.validateSource" (dict "key" "dataset.source" "source" "https://example.com/corpus.jsonl.zst") }}
*/}}
{{- define "tokenmill.validateSource" -}}
{{- $first := "(?i)^[a-z0-9+.-]+://[^/?#@:]*:" -}}
{{- $password := list (print $first "[^/?#]*@") (print $first "[0-9]*[^0-9/?#@][^@]*@") "(?i)^https?://[^/?#]*@" "(?i)^(hf|s3|gs|az|abfs)://[^/?#]*:[^@]*@" -}}
{{- if regexMatch (join "|" $password) .source }}
{{- fail (printf "\n%s contains a password: the Job and logs would show it.\nRemove it, and pass credentials with serviceAccount, or with extraEnv and a secretKeyRef." .key) }}
{{- end }}
{{- if regexMatch "(?i)[?&](sig|signature|x-amz-signature|x-amz-security-token|x-goog-signature|token|access_token)=" .source }}
{{- fail (printf "\n%s contains a signature: the Job would show it.\nRemove it, and pass credentials with serviceAccount, or with extraEnv and a secretKeyRef: AZURE_STORAGE_SAS_TOKEN for az://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://." .key) }}
{{- end }}
{{- end }}

{{/*
Check that the claim has a name. Input: dict "root" $, "more" (text after the message). Output: nothing, or fails.
  {{ include "tokenmill.validateClaimName" (dict "root" .) }}
*/}}
{{- define "tokenmill.validateClaimName" -}}
{{- if not .root.Values.storage.pvcName }}
{{- fail (printf "\nstorage.pvcName is not set: it must name the PVC that holds the data.\nAdd --set storage.pvcName=NAME. To list the PVCs: kubectl get pvc -n %s. To create one: charts/shared-storage.%s" .root.Release.Namespace (.more | default "")) }}
{{- end }}
{{- end }}

{{/*
Refuse a mount path that would hide files of the image or of the pod. Input: dict "key" "mount". Output: nothing, or fails.
  {{ include "tokenmill.validateMount" (dict "key" "storage.mountPath" "mount" "/data") }}
*/}}
{{- define "tokenmill.validateMount" -}}
{{- if has (index (splitList "/" .mount) 1) (list "bin" "dev" "etc" "lib" "lib64" "opt" "proc" "sbin" "scratch" "sys" "usr") }}
{{- fail (printf "\n%s=%q would hide files of the image or of the pod; choose another directory, such as /data." .key .mount) }}
{{- end }}
{{- end }}

{{/*
Check the objects of the cluster that this release needs or would overwrite, if this render can read the cluster. A pod
without its claim, ConfigMap or account waits forever, and only its events report the reason. Helm stops at a forbidden
look-up, and no template can catch that: the chart looks up only with `checkCluster` the objects that an installation does
not need rights for. Input: dict "root", "apiVersion" "kind" "name" of the object that runs, and "claims": dict of key to
claim. Output: nothing, or fails.
  {{ include "tokenmill.validateCluster" (dict "root" . "apiVersion" "batch/v1" "kind" "Job" "name" "x" "claims" (dict "storage.pvcName" "x")) }}
*/}}
{{- define "tokenmill.validateCluster" -}}
{{- if eq (include "tokenmill.connected" .root) "true" }}
{{- $existing := include "tokenmill.existingObject" . | fromYaml }}
{{- if and $existing (ne (index ($existing.metadata.annotations | default dict) "meta.helm.sh/release-name") .root.Release.Name) }}
{{- fail (printf "\nthe %s %q exists in namespace %s and does not belong to this release; choose another release name." .kind .name .root.Release.Namespace) }}
{{- end }}
{{- if and $existing $existing.metadata.deletionTimestamp }}
{{- fail (printf "\nthe %s %q is still being deleted, and the deletion would remove the new one too.\nWait for its end: kubectl wait --for=delete %s/%s -n %s --timeout=5m" .kind .name (lower .kind) .name .root.Release.Namespace) }}
{{- end }}
{{- if ne (toJson .root.Values.checkCluster) "false" }}
{{- range $key, $claim := .claims }}
{{- $existingClaim := dict }}
{{- if $claim }}{{ $existingClaim = lookup "v1" "PersistentVolumeClaim" $.root.Release.Namespace $claim }}{{ end }}
{{- if ($existingClaim.metadata).deletionTimestamp }}
{{- fail (printf "\n%s: the PersistentVolumeClaim %q is being deleted, and new pods cannot use it.\nWait for its end (kubectl wait --for=delete pvc/%s -n %s --timeout=5m) and create it again, or name another PVC: kubectl get pvc -n %s" $key $claim $claim $.root.Release.Namespace $.root.Release.Namespace) }}
{{- end }}
{{- if and $claim (not $existingClaim) }}
{{- fail (printf "\n%s: there is no PersistentVolumeClaim %q in namespace %s, and the pods would wait for it forever.\nCreate it: helm install shared-storage charts/shared-storage -n %s --set pvc.name=%s\nOr name another PVC: kubectl get pvc -n %s" $key $claim $.root.Release.Namespace $.root.Release.Namespace $claim $.root.Release.Namespace) }}
{{- end }}
{{- end }}
{{- $environment := .root.Values.environment.configMap -}}
{{- if and $environment (eq (include "tokenmill.isOptionalConfigMap" $environment) "false") (not (lookup "v1" "ConfigMap" .root.Release.Namespace $environment)) }}
{{- fail (printf "\nenvironment.configMap: there is no ConfigMap %q in namespace %s, and the pods would not have its variables.\nCreate it, or name another one (kubectl get configmaps -n %s), or use none: --set environment.configMap=" $environment .root.Release.Namespace .root.Release.Namespace) }}
{{- end }}
{{- $ca := .root.Values.environment.caBundle.configMap -}}
{{- if and $ca (not (lookup "v1" "ConfigMap" .root.Release.Namespace $ca)) }}
{{- fail (printf "\nenvironment.caBundle.configMap: there is no ConfigMap %q in namespace %s, and the pods would wait for it forever.\nCreate it: kubectl create configmap %s -n %s --from-file=%s" $ca .root.Release.Namespace $ca .root.Release.Namespace .root.Values.environment.caBundle.key) }}
{{- end }}
{{- include "tokenmill.validateKey" (dict "root" .root "setting" "environment.caBundle.key" "kind" "ConfigMap" "name" $ca "key" .root.Values.environment.caBundle.key) }}
{{- $values := .root.Values }}
{{- $webhook := $values.notify.urlSecret.name }}
{{- if and $webhook (not (lookup "v1" "Secret" .root.Release.Namespace $webhook)) }}
{{- fail (printf "\nnotify.urlSecret.name: there is no Secret %q in namespace %s, and the end would not be announced.\nCreate it: kubectl create secret generic %s -n %s --from-file=%s=/dev/stdin" $webhook .root.Release.Namespace $webhook .root.Release.Namespace $values.notify.urlSecret.key) }}
{{- end }}
{{- include "tokenmill.validateKey" (dict "root" .root "setting" "notify.urlSecret.key" "kind" "Secret" "name" $webhook "key" $values.notify.urlSecret.key) }}
{{- $account := ternary "" $values.serviceAccount.name (eq true $values.serviceAccount.create) }}
{{- range list (list "hub.tokenSecret.name" "Secret" (($values.hub).tokenSecret).name) (list "serviceAccount.name" "ServiceAccount" $account) }}
{{- if and (last .) (not (lookup "v1" (index . 1) $.root.Release.Namespace (last .))) }}
{{- fail (printf "\n%s: there is no %s %q in namespace %s, and the pods would wait for it forever.\nCreate it, or name another one: kubectl get %s -n %s" (first .) (index . 1) (last .) $.root.Release.Namespace (lower (index . 1)) $.root.Release.Namespace) }}
{{- end }}
{{- end }}
{{- with ($values.hub).tokenSecret }}
{{- include "tokenmill.validateKey" (dict "root" $.root "setting" "hub.tokenSecret.key" "kind" "Secret" "name" .name "key" .key) }}
{{- end }}
{{- range $values.extraEnv }}
{{- $variable := .name }}
{{- range $kind, $reference := dict "Secret" (.valueFrom).secretKeyRef "ConfigMap" (.valueFrom).configMapKeyRef }}
{{- if and $reference (not $reference.optional) }}
{{- if not (lookup "v1" $kind $.root.Release.Namespace $reference.name) }}
{{- fail (printf "\nextraEnv: there is no %s %q in namespace %s for the variable %s, and the pods would wait for it forever.\nCreate it, or name another one: kubectl get %s -n %s" $kind $reference.name $.root.Release.Namespace $variable (lower $kind) $.root.Release.Namespace) }}
{{- end }}
{{- include "tokenmill.validateKey" (dict "root" $.root "setting" (printf "extraEnv, variable %s" $variable) "kind" $kind "name" $reference.name "key" $reference.key) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Check that a ConfigMap or Secret that exists has a key: a container without it waits forever, or has no such file. Input:
dict "root", "setting" that names the key, "kind", "name" and "key". Output: nothing, or fails.
  {{ include "tokenmill.validateKey" (dict "root" . "setting" "hub.tokenSecret.key" "kind" "Secret" "name" "hub" "key" "token") }}
*/}}
{{- define "tokenmill.validateKey" -}}
{{- $object := dict -}}
{{- if .name }}{{ $object = lookup "v1" .kind .root.Release.Namespace .name | default dict }}{{ end -}}
{{- $keys := merge dict ($object.data | default dict) ($object.binaryData | default dict) | keys | sortAlpha -}}
{{- if and $object (not (has .key $keys)) }}
{{- fail (printf "\n%s: the %s %q in namespace %s has no key %q; it has %s.\nAdd the key, or set another one." .setting .kind .name .root.Release.Namespace .key (join ", " $keys | default "no keys")) }}
{{- end }}
{{- end }}

{{/*
Check that the Job's pods can have the hostname JOB-INDEX, a DNS label. Input: the stage's dict. Output: nothing, or fails.
  {{ include "tokenmill.validateName" . }}
*/}}
{{- define "tokenmill.validateName" -}}
{{- $name := include "tokenmill.jobName" . -}}
{{- $last := printf "%s-%d" $name (sub (int64 .root.Values.workers) 1) -}}
{{- if contains "." $name }}
{{- fail (printf "\nthe release name %q contains a dot: the name of an Indexed Job must not contain dots; choose another name, such as %q." .root.Release.Name (replace "." "-" .root.Release.Name)) }}
{{- end }}
{{- if gt (len $last) 63 }}
{{- fail (printf "\nthe release name %q is too long: the name of its last pod would be %q with %d characters, and 63 are allowed.\nChoose a release name that is at least %d characters shorter." .root.Release.Name $last (len $last) (sub (len $last) 63)) }}
{{- end }}
{{- end }}

{{/*
Check a path on a volume, or the address of a bucket. Input: dict "key" "path" "mount". Output: nothing, or fails.
  {{ include "tokenmill.validatePlace" (dict "key" "dataset.inputPath" "path" "s3://bucket/corpus" "mount" "/data") }}
*/}}
{{- define "tokenmill.validatePlace" -}}
{{- if regexMatch "(?i)^(s3|gs|az|abfs)://[^/]" (.path | default "") -}}
{{- include "tokenmill.validateSource" (dict "key" .key "source" .path) -}}
{{- range splitList "/" .path }}
{{- if has . (list "." "..") }}{{ fail (printf "\n%s=%q contains %q.\nWrite the prefix without it." $.key $.path .) }}{{ end }}
{{- end }}
{{- else -}}
{{- include "tokenmill.validatePath" . -}}
{{- end -}}
{{- end }}

{{/*
Check that a path is relative to its volume and stays inside. Input: dict "key" "path" "mount". Output: nothing, or fails.
  {{ include "tokenmill.validatePath" (dict "key" "dataset.inputPath" "path" "slimpajama" "mount" "/data") }}
*/}}
{{- define "tokenmill.validatePath" -}}
{{- if hasPrefix "/" (.path | default "") }}
{{- fail (printf "\n%s=%q begins with a slash: the path must be relative to the volume, which the pod mounts at %s.\nSet a path such as %q." .key .path .mount (trimPrefix "/" (trimPrefix .mount .path))) }}
{{- end }}
{{- if regexMatch "^[A-Za-z][A-Za-z0-9+.-]*:/|://" (.path | default "") }}
{{- fail (printf "\n%s=%q is an address: the path must be a directory on the volume. Buckets are not supported here.\nSet a path below the root of the volume, such as slimpajama/preprocessed." .key .path) }}
{{- end }}
{{- range splitList "/" (.path | default "") }}
{{- if has . (list "." "..") }}
{{- fail (printf "\n%s=%q contains %q: the path must stay inside the volume.\nSet a path below its root, such as slimpajama/preprocessed." $.key $.path .) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Fail because files are missing that the chart reaches by a symbolic link in Git. Flux's source-controller and some
archives omit links. Input: the missing path in the chart. Output: none, the render fails.
  {{ include "tokenmill.failMissingFiles" "models" }}
*/}}
{{- define "tokenmill.failMissingFiles" -}}
{{- fail (printf "\nthis copy of the chart has no %s: it is a symbolic link in Git, which Flux's GitRepository omits, and so do checkouts and archives without symbolic links.\nUse the packaged chart, which contains the files: helm install RELEASE oci://REGISTRY/CHART; in Flux, use an OCIRepository or a HelmRepository (docs/gitops.md). Or run helm package in a clone with links." .) }}
{{- end }}
