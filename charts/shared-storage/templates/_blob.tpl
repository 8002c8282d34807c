{{/*
Return the objects for Azure Blob Storage: a new container, or an existing one. Input: $. Output: documents.
  {{ include "shared-storage.blob.volume" . }}
*/}}
{{- define "shared-storage.blob.volume" -}}
{{- $blob := .Values.blob -}}
{{- $options := include "shared-storage.blob.options" . | fromJsonArray -}}
{{- $size := .Values.pvc.size | default "100Ti" | toString -}}
{{- $names := dict "storageAccount" "storageAccount" "resourceGroup" "resourceGroup" "subscriptionID" "subscriptionID" "isHnsEnabled" "isHnsEnabled"
      "AzureStorageAuthType" "azureStorageAuthType" "AzureStorageIdentityClientID" "azureStorageIdentityClientID" -}}
{{- if $blob.containerName }}
{{- $attributes := include "shared-storage.parameters" (dict "section" $blob "names" (merge (dict "containerName" "containerName") $names)) | fromJson -}}
{{- $_ := set $attributes "protocol" ($blob.protocol | default "fuse2") -}}
{{- /* The last part makes the handle unique: a node cannot mount two volumes with the same handle. */}}
{{- $handle := printf "%s#%s#%s#%s" $blob.resourceGroup $blob.storageAccount $blob.containerName (include "shared-storage.volumeName" .) -}}
{{- $csi := dict "driver" "blob.csi.azure.com" "volumeHandle" $handle "volumeAttributes" $attributes -}}
{{- with $blob.secretName }}{{ $_ := set $csi "nodeStageSecretRef" (dict "name" . "namespace" $.Release.Namespace) }}{{ end -}}
{{ include "shared-storage.static" (dict "root" . "size" $size "mountOptions" $options "spec" (dict "csi" $csi)) }}
{{- else }}
{{- $parameters := include "shared-storage.parameters" (dict "section" $blob "names" (merge (dict "skuName" "skuName" "location" "location"
      "accessTier" "accessTier" "networkEndpointType" "networkEndpointType" "tags" "tags") $names)) | fromJson -}}
{{- $_ := set $parameters "protocol" ($blob.protocol | default "fuse2") -}}
{{ include "shared-storage.dynamic" (dict "root" . "size" $size "provisioner" "blob.csi.azure.com"
      "parameters" $parameters "mountOptions" $options "grows" true) }}
{{- end }}
{{- end }}

{{/*
Return its mount options. By default BlobFuse caches the attributes of a name for 120 s, in the kernel and in its own cache:
nodes would read stale receipts and checkpoint trackers of other nodes. By default it reads two blocks ahead for each CPU of
the node, and fails to mount if the requested pool is smaller; the minimum is 11. Input: $. Output: a JSON list.
  {{ include "shared-storage.blob.options" . | fromJsonArray }}
*/}}
{{- define "shared-storage.blob.options" -}}
{{- $blob := .Values.blob -}}
{{- $derived := list "nconnect=4" "lookupcache=positive" -}}
{{- if ne $blob.protocol "nfs" }}
{{- $seconds := int64 ($blob.attributeTimeoutSeconds | default 0) }}
{{- $derived = list "-o allow_other" "--log-level=LOG_WARNING" "--cancel-list-on-mount-seconds=10" }}
{{- range list "-o attr_timeout" "-o entry_timeout" "-o negative_timeout" "--attr-cache-timeout" }}{{ $derived = append $derived (printf "%s=%d" . $seconds) }}{{ end }}
{{- if eq $blob.cache "block" }}
{{- $cache := $blob.blockCache | default dict }}
{{- $derived = concat $derived (list "--block-cache" (printf "--block-cache-block-size=%d" (int64 ($cache.blockSizeMb | default 32)))
      (printf "--block-cache-pool-size=%d" (int64 ($cache.poolSizeMb | default 4096))) (printf "--block-cache-parallelism=%d" (int64 ($cache.parallelism | default 80)))
      (printf "--block-cache-prefetch=%d" (int64 ($cache.prefetch | default 11)))) }}
{{- else }}
{{- $cache := $blob.fileCache | default dict }}
{{- $derived = append $derived (printf "--file-cache-timeout-in-seconds=%d" (int64 ($cache.timeoutSeconds | default 0))) }}
{{- with $cache.sizeMb }}{{ $derived = append $derived (printf "--cache-size-mb=%d" (int64 .)) }}{{ end }}
{{- with $cache.path }}{{ $derived = append $derived (printf "--tmp-path=%s" .) }}{{ end }}
{{- end }}
{{- end }}
{{- toJson (.Values.storage.mountOptions | default $derived) }}
{{- end }}

{{/*
Check the section of this back end. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.blob.rules" . }}
*/}}
{{- define "shared-storage.blob.rules" -}}
{{- $blob := .Values.blob -}}
{{- $nfs := eq $blob.protocol "nfs" -}}
{{- $query := dict "section" $blob "prefix" "blob." -}}
{{- $file := include "shared-storage.setKeys" (set $query "keys" (list "fileCache")) -}}
{{- $block := include "shared-storage.setKeys" (set $query "keys" (list "blockCache")) -}}
{{- $fuse := include "shared-storage.setKeys" (set $query "keys" (list "attributeTimeoutSeconds" "blockCache" "cache" "fileCache")) -}}
{{- $keys := include "shared-storage.setKeys" (set $query "keys" (list "azureStorageAuthType" "azureStorageIdentityClientID" "secretName")) -}}
{{- $cache := $blob.blockCache | default dict -}}
{{- $prefetch := $cache.prefetch | default 11 | int64 -}}
{{- $ahead := mul $prefetch ($cache.blockSizeMb | default 32) -}}
{{- $pool := $cache.poolSizeMb | default 4096 | int64 -}}
{{- range list
      (list (and $nfs (or $fuse $keys)) (printf "blob.protocol=nfs does not read %s, which apply to BlobFuse." (join ", " (compact (list $fuse $keys)))) "Remove them, or set blob.protocol=fuse2.")
      (list (and $fuse .Values.storage.mountOptions) (printf "storage.mountOptions replaces all mount options that the chart derives from %s." $fuse) "Remove storage.mountOptions, or the other keys.")
      (list (and $file (or $block (eq $blob.cache "block"))) (printf "%s and %s contradict each other: BlobFuse caches either complete files on disk or blocks in memory, and would not use the file cache." (ternary "blob.cache=block" $block (eq $blob.cache "block")) $file) "Remove one of them.")
      (list (and $block (ne $blob.cache "block")) (printf "%s is read only with blob.cache=block." $block) "Set blob.cache=block, or remove the key.")
      (list (gt $ahead $pool) (printf "blob.blockCache.prefetch=%d blocks of %v MB need %d MB, more than the %d MB of blob.blockCache.poolSizeMb: the mount would fail." $prefetch ($cache.blockSizeMb | default 32) $ahead $pool) "Lower prefetch (at least 11) or blockSizeMb, or raise poolSizeMb, the memory on each node.")
      (list (and $blob.containerName (not $blob.storageAccount)) (printf "blob.containerName=%s needs blob.storageAccount, which is not set." $blob.containerName) "Add --set blob.storageAccount=ACCOUNT, or remove blob.containerName to create a new container.")
      (list (and $blob.secretName (not $blob.containerName)) "blob.secretName is read only for an existing container, blob.containerName; for a new container the driver stores the key itself." "Remove it, or set blob.containerName.")
      (list (and $blob.subscriptionID (not $blob.resourceGroup)) "blob.subscriptionID needs blob.resourceGroup, the resource group of the account." "Add --set blob.resourceGroup=GROUP.")
      (list (and $nfs (eq false $blob.isHnsEnabled)) "blob.isHnsEnabled=false contradicts blob.protocol=nfs, which always has a hierarchical namespace." "Remove it.") }}
{{- if first . }}{{ fail (printf "\n%s\n%s" (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- if $blob.containerName }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "blob" "named" "containerName" "keys" (list "skuName" "location" "accessTier" "networkEndpointType" "tags")) }}
{{- end }}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.blob.warnings" . }}
*/}}
{{- define "shared-storage.blob.warnings" -}}
{{- if ne .Values.blob.protocol "nfs" }}
{{- include "shared-storage.blobfuseWarnings" (printf " %s " (include "shared-storage.blob.options" . | fromJsonArray | join " ")) }}
{{- end }}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.blob.properties" . | fromJson }}
*/}}
{{- define "shared-storage.blob.properties" -}}
{{- $container := (.Values.blob | default dict).containerName -}}
{{ dict "driver" "blob.csi.azure.com" "fit" "blob" "source" (ternary (printf "the container %s" $container) "" (not (empty $container))) | toJson }}
{{- end }}

{{/*
Return the warnings about BlobFuse's mount options. Each of its caches lasts 120 s unless an option sets another time, and the
block cache replaces the file cache (cmd/mount.go and component/ of azure-storage-fuse). Input: the options as text, with a
space at each end. Output: lines, or nothing.
  {{ include "shared-storage.blobfuseWarnings" " -o allow_other --block-cache " }}
*/}}
{{- define "shared-storage.blobfuseWarnings" -}}
{{- $direct := regexMatch "[ ,]direct_io|--direct-io" . -}}
{{- $uncached := or $direct (contains "--disable-kernel-cache" .) -}}
{{- $block := contains " --block-cache " . -}}
{{- $disabled := dict "attr-cache-timeout" (or $direct (contains "--use-attr-cache=false" .)) "file-cache-timeout" (or $direct $block) -}}
{{- $stale := list }}{{ $seconds := 0 -}}
{{- range list "attr_timeout" "entry_timeout" "negative_timeout" "attr-cache-timeout" "file-cache-timeout" }}
{{- $option := regexFind (printf "[-, ]%s(-in-seconds)?[= ][0-9]+" (regexReplaceAll "[-_]" . "[-_]")) $ }}
{{- $duration := regexFind "[0-9]+$" $option | default "120" | int }}
{{- if and $duration (not (ternary (get $disabled .) $uncached (hasKey $disabled .))) }}
{{- $stale = append $stale (ternary . (printf "%s, %d by default" . $duration) (not (empty $option))) }}{{ $seconds = max $seconds $duration }}
{{- end }}
{{- end }}
{{- with $stale }}
Warning: a node caches the attributes of a file, also of a missing one, for up to {{ $seconds }} s ({{ join "; " . }}): stages see the files of other nodes only after that time, and a restarted training run may read an old checkpoint tracker. Set them to 0.
{{- end }}
{{- if $block }}
{{- with regexFindAll "--(file-cache-timeout[a-z-]*|cache-size-mb|tmp-path)" . -1 }}
Warning: {{ join ", " . }} {{ ternary "has" "have" (eq (len .) 1) }} no effect with --block-cache, which replaces the file cache. Remove {{ ternary "it" "them" (eq (len .) 1) }}, or remove --block-cache.
{{- end }}
Warning: --block-cache keeps its blocks in the node's memory, outside the limits of pods: {{ regexFind "--block-cache-pool-size=[0-9]+" . | default "more than half of it, because --block-cache-pool-size is not set; set it in MB" }}. Checkpoints in torch's old format, which writes at changing offsets, have failed with it (azure-storage-fuse#1537).
{{- end }}
{{- if not (regexMatch "[ ,]allow_other|--allow-other" .) }}
Warning: without -o allow_other only root can read the volume, and the pods do not run as root. Add it.
{{- end }}
{{- end }}
