{{/*
Azure Blob Storage: a new container, or one that is there. Input: $. Output: documents.
  {{ include "shared-storage.blob.volume" . }}
*/}}
{{- define "shared-storage.blob.volume" -}}
{{- $blob := .Values.blob -}}
{{- $options := include "shared-storage.blob.options" . | fromJsonArray -}}
{{- $size := .Values.pvc.size | default "100Ti" | toString -}}
{{- $names := dict "storageAccount" "storageAccount" "resourceGroup" "resourceGroup" "subscriptionID" "subscriptionID" "isHnsEnabled" "isHnsEnabled"
      "AzureStorageAuthType" "azureStorageAuthType" "AzureStorageIdentityClientID" "azureStorageIdentityClientID" -}}
{{- if $blob.containerName }}
{{- $attributes := include "shared-storage.parameters" (dict "of" $blob "names" (merge (dict "containerName" "containerName") $names)) | fromJson -}}
{{- $_ := set $attributes "protocol" ($blob.protocol | default "fuse2") -}}
{{- /* The last part keeps two volumes of one container apart, which a node could not mount otherwise. */}}
{{- $handle := printf "%s#%s#%s#%s" $blob.resourceGroup $blob.storageAccount $blob.containerName (include "shared-storage.volumeName" .) -}}
{{- $csi := dict "driver" "blob.csi.azure.com" "volumeHandle" $handle "volumeAttributes" $attributes -}}
{{- with $blob.secretName }}{{ $_ := set $csi "nodeStageSecretRef" (dict "name" . "namespace" $.Release.Namespace) }}{{ end -}}
{{ include "shared-storage.static" (dict "root" . "size" $size "mountOptions" $options "spec" (dict "csi" $csi)) }}
{{- else }}
{{- $parameters := include "shared-storage.parameters" (dict "of" $blob "names" (merge (dict "skuName" "skuName" "location" "location"
      "accessTier" "accessTier" "networkEndpointType" "networkEndpointType" "tags" "tags") $names)) | fromJson -}}
{{- $_ := set $parameters "protocol" ($blob.protocol | default "fuse2") -}}
{{ include "shared-storage.dynamic" (dict "root" . "size" $size "provisioner" "blob.csi.azure.com"
      "parameters" $parameters "mountOptions" $options "grows" true) }}
{{- end }}
{{- end }}

{{/*
Its mount options. BlobFuse believes for 120 s what it knows of a name unless it is told otherwise, in the kernel and in its
own cache of attributes: receipts and checkpoint trackers of other nodes would be old. Unasked it reads two blocks ahead for
each CPU of the node, and fails to mount where the pool that is asked for holds fewer; 11 is the least it takes. Input: $. Output: a JSON list.
  {{ include "shared-storage.blob.options" . | fromJsonArray }}
*/}}
{{- define "shared-storage.blob.options" -}}
{{- $blob := .Values.blob -}}
{{- $made := list "nconnect=4" "lookupcache=positive" -}}
{{- if ne $blob.protocol "nfs" }}
{{- $seconds := int64 ($blob.attributeTimeoutSeconds | default 0) }}
{{- $made = list "-o allow_other" "--log-level=LOG_WARNING" "--cancel-list-on-mount-seconds=10" }}
{{- range list "-o attr_timeout" "-o entry_timeout" "-o negative_timeout" "--attr-cache-timeout" }}{{ $made = append $made (printf "%s=%d" . $seconds) }}{{ end }}
{{- if eq $blob.cache "block" }}
{{- $of := $blob.blockCache | default dict }}
{{- $made = concat $made (list "--block-cache" (printf "--block-cache-block-size=%d" (int64 ($of.blockSizeMb | default 32)))
      (printf "--block-cache-pool-size=%d" (int64 ($of.poolSizeMb | default 4096))) (printf "--block-cache-parallelism=%d" (int64 ($of.parallelism | default 80)))
      (printf "--block-cache-prefetch=%d" (int64 ($of.prefetch | default 11)))) }}
{{- else }}
{{- $of := $blob.fileCache | default dict }}
{{- $made = append $made (printf "--file-cache-timeout-in-seconds=%d" (int64 ($of.timeoutSeconds | default 0))) }}
{{- with $of.sizeMb }}{{ $made = append $made (printf "--cache-size-mb=%d" (int64 .)) }}{{ end }}
{{- with $of.path }}{{ $made = append $made (printf "--tmp-path=%s" .) }}{{ end }}
{{- end }}
{{- end }}
{{- toJson (.Values.storage.mountOptions | default $made) }}
{{- end }}

{{/*
Its rules. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.blob.rules" . }}
*/}}
{{- define "shared-storage.blob.rules" -}}
{{- $blob := .Values.blob -}}
{{- $nfs := eq $blob.protocol "nfs" -}}
{{- $of := dict "of" $blob "prefix" "blob." -}}
{{- $file := include "shared-storage.given" (set $of "keys" (list "fileCache")) -}}
{{- $block := include "shared-storage.given" (set $of "keys" (list "blockCache")) -}}
{{- $fuse := include "shared-storage.given" (set $of "keys" (list "attributeTimeoutSeconds" "blockCache" "cache" "fileCache")) -}}
{{- $keys := include "shared-storage.given" (set $of "keys" (list "azureStorageAuthType" "azureStorageIdentityClientID" "secretName")) -}}
{{- $cache := $blob.blockCache | default dict -}}
{{- $prefetch := $cache.prefetch | default 11 | int64 -}}
{{- $ahead := mul $prefetch ($cache.blockSizeMb | default 32) -}}
{{- $pool := $cache.poolSizeMb | default 4096 | int64 -}}
{{- range list
      (list (and $nfs (or $fuse $keys)) (printf "blob.protocol=nfs does not read %s, which are BlobFuse's." (join ", " (compact (list $fuse $keys)))) "Leave them out, or set blob.protocol=fuse2.")
      (list (and $fuse .Values.storage.mountOptions) (printf "storage.mountOptions stand in place of all that the chart makes of %s." $fuse) "Leave out the one or the others.")
      (list (and $file (or $block (eq $blob.cache "block"))) (printf "%s and %s contradict each other: BlobFuse keeps whole files on disk or blocks in memory, never both, and would drop the files' cache." (ternary "blob.cache=block" $block (eq $blob.cache "block")) $file) "Leave out the one or the other.")
      (list (and $block (ne $blob.cache "block")) (printf "%s is read with blob.cache=block alone." $block) "Set that, or leave it out.")
      (list (gt $ahead $pool) (printf "blob.blockCache.prefetch=%d blocks of %v MB are %d MB, above the %d MB of blob.blockCache.poolSizeMb: the mount would fail." $prefetch ($cache.blockSizeMb | default 32) $ahead $pool) "Lower prefetch, to 11 at least, or blockSizeMb, or raise poolSizeMb, which is memory of each node.")
      (list (and $blob.containerName (not $blob.storageAccount)) (printf "blob.containerName=%s is a container of blob.storageAccount, which is not set." $blob.containerName) "Add --set blob.storageAccount=ACCOUNT, or leave out the container and have a new one made.")
      (list (and $blob.secretName (not $blob.containerName)) "blob.secretName is read for a container that is there, blob.containerName; for a new one the driver keeps the key itself." "Leave it out, or name the container.")
      (list (and $blob.subscriptionID (not $blob.resourceGroup)) "blob.subscriptionID needs blob.resourceGroup, the account's." "Add --set blob.resourceGroup=GROUP.")
      (list (and $nfs (eq false $blob.isHnsEnabled)) "blob.isHnsEnabled=false contradicts blob.protocol=nfs, which has a hierarchical namespace always." "Leave it out.") }}
{{- if first . }}{{ fail (printf "\n%s\n%s" (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- if $blob.containerName }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "blob" "named" "containerName" "keys" (list "skuName" "location" "accessTier" "networkEndpointType" "tags")) }}
{{- end }}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.blob.warnings" . }}
*/}}
{{- define "shared-storage.blob.warnings" -}}
{{- if ne .Values.blob.protocol "nfs" }}
{{- include "shared-storage.blobfuseWarnings" (printf " %s " (include "shared-storage.blob.options" . | fromJsonArray | join " ")) }}
{{- end }}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.blob.about" . | fromJson }}
*/}}
{{- define "shared-storage.blob.about" -}}
{{- $there := (.Values.blob | default dict).containerName -}}
{{ dict "driver" "blob.csi.azure.com" "fit" "blob" "source" (ternary (printf "the container %s" $there) "" (not (empty $there))) | toJson }}
{{- end }}

{{/*
BlobFuse's mount options. Each of its caches lasts 120 s unless an option says otherwise, and block cache takes
the place of file cache (cmd/mount.go and component/ of azure-storage-fuse). Input: the options as text, with a space at
each end. Output: lines, or none.
  {{ include "shared-storage.blobfuseWarnings" " -o allow_other --block-cache " }}
*/}}
{{- define "shared-storage.blobfuseWarnings" -}}
{{- $direct := regexMatch "[ ,]direct_io|--direct-io" . -}}
{{- $quiet := or $direct (contains "--disable-kernel-cache" .) -}}
{{- $block := contains " --block-cache " . -}}
{{- $off := dict "attr-cache-timeout" (or $direct (contains "--use-attr-cache=false" .)) "file-cache-timeout" (or $direct $block) -}}
{{- $old := list }}{{ $seconds := 0 -}}
{{- range list "attr_timeout" "entry_timeout" "negative_timeout" "attr-cache-timeout" "file-cache-timeout" }}
{{- $given := regexFind (printf "[-, ]%s(-in-seconds)?[= ][0-9]+" (regexReplaceAll "[-_]" . "[-_]")) $ }}
{{- $lasts := regexFind "[0-9]+$" $given | default "120" | int }}
{{- if and $lasts (not (ternary (get $off .) $quiet (hasKey $off .))) }}
{{- $old = append $old (ternary . (printf "%s, %d when it is not given" . $lasts) (not (empty $given))) }}{{ $seconds = max $seconds $lasts }}
{{- end }}
{{- end }}
{{- with $old }}
Mind: a node believes for up to {{ $seconds }} s what it knows of a file, that it is missing included ({{ join "; " . }}): stages find what other nodes wrote only then, and a training run that starts again may read an old checkpoint tracker. Set them to 0.
{{- end }}
{{- if $block }}
{{- with regexFindAll "--(file-cache-timeout[a-z-]*|cache-size-mb|tmp-path)" . -1 }}
Mind: {{ join ", " . }} {{ ternary "does" "do" (eq (len .) 1) }} nothing beside --block-cache, which takes the place of the file cache. Leave {{ ternary "it" "them" (eq (len .) 1) }} out, or leave out --block-cache.
{{- end }}
Mind: --block-cache keeps its blocks in the node's memory, outside the limits of pods: {{ regexFind "--block-cache-pool-size=[0-9]+" . | default "more than half of it, since --block-cache-pool-size is not given: set that in MB" }}. Checkpoints in torch's old format, which writes back and forth, have failed with it (azure-storage-fuse#1537).
{{- end }}
{{- if not (regexMatch "[ ,]allow_other|--allow-other" .) }}
Mind: without -o allow_other only root reads the volume, and the pods are not root. Add it.
{{- end }}
{{- end }}
