{{/*
Return the objects for Azure Managed Lustre: a new file system, or an existing one. Input: $. Output: documents.
  {{ include "shared-storage.amlfs.volume" . }}
*/}}
{{- define "shared-storage.amlfs.volume" -}}
{{- $amlfs := .Values.amlfs -}}
{{- $options := .Values.storage.mountOptions | default (list "noatime" "flock") -}}
{{- $size := printf "%dTi" (int64 $amlfs.storageCapacityTiB) -}}
{{- if $amlfs.mgsIpAddress }}
{{- $attributes := include "shared-storage.parameters" (dict "section" $amlfs "names" (dict "mgs-ip-address" "mgsIpAddress" "sub-dir" "subDir")) | fromJson -}}
{{ include "shared-storage.static" (dict "root" . "size" $size "mountOptions" $options "spec" (dict "csi" (dict
      "driver" "azurelustre.csi.azure.com" "volumeHandle" (include "shared-storage.volumeName" .) "volumeAttributes" $attributes))) }}
{{- else }}
{{- $parameters := include "shared-storage.parameters" (dict "section" $amlfs "names" (dict
      "sku-name" "skuName" "zone" "zone" "maintenance-day-of-week" "maintenanceDayOfWeek"
      "maintenance-time-of-day-utc" "maintenanceTimeOfDayUtc" "location" "location" "resource-group-name" "resourceGroupName"
      "vnet-resource-group" "vnetResourceGroup" "vnet-name" "vnetName" "subnet-name" "subnetName"
      "identities" "identities" "tags" "tags" "sub-dir" "subDir")) | fromJson -}}
{{ include "shared-storage.dynamic" (dict "root" . "size" $size "provisioner" "azurelustre.csi.azure.com"
      "parameters" $parameters "mountOptions" $options "grows" false) }}
{{- end }}
{{- end }}

{{/*
Check the section: the steps of each SKU, to which the driver would round up, and the driver's rules
(docs/driver-parameters.md). The driver itself refuses a size above the SKU's maximum. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.amlfs.rules" . }}
*/}}
{{- define "shared-storage.amlfs.rules" -}}
{{- $amlfs := .Values.amlfs -}}
{{- if contains "${pod." $amlfs.subDir }}
{{- fail (printf "\namlfs.subDir=%q differs from pod to pod, but the stages must share one directory.\nRemove the pod from it." $amlfs.subDir) }}
{{- end }}
{{- if $amlfs.mgsIpAddress }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "amlfs" "named" "mgsIpAddress" "keys" (list "zone" "maintenanceDayOfWeek"
      "maintenanceTimeOfDayUtc" "location" "resourceGroupName" "vnetResourceGroup" "vnetName" "subnetName" "identities" "tags")) }}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "amlfs" "keys" (list "storageCapacityTiB") "remedy" "Add --set amlfs.storageCapacityTiB=SIZE, the size of the existing file system.") }}
{{- if contains "${pv" $amlfs.subDir }}
{{- fail (printf "\namlfs.subDir=%q contains a variable of the PVC or volume, which the driver cannot replace with amlfs.mgsIpAddress.\nSet the directory's name." $amlfs.subDir) }}
{{- end }}
{{- else }}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "amlfs" "keys" (list "skuName" "storageCapacityTiB" "maintenanceDayOfWeek" "maintenanceTimeOfDayUtc")
      "remedy" "Add -f values/storage/amlfs.yaml, which sets them. For an existing file system: -f values/storage/amlfs-static.yaml --set amlfs.mgsIpAddress=ADDRESS.") }}
{{- $size := int64 $amlfs.storageCapacityTiB }}
{{- $sku := trimPrefix "AMLFS-Durable-Premium-" $amlfs.skuName }}
{{- $step := index (dict "40" 48 "125" 16 "250" 8 "500" 4) $sku | int64 }}
{{- if mod $size $step }}
{{- $nextSize := mul (add1 (div $size $step)) $step }}
{{- fail (printf "\namlfs.storageCapacityTiB=%d is not a multiple of %d, the step of amlfs.skuName=%s: Azure would create, and bill, %d TiB.\nSet %s%d." $size $step $amlfs.skuName $nextSize (ternary "" (printf "%d or " (sub $nextSize $step)) (lt $size $step)) $nextSize) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.amlfs.warnings" . }}
*/}}
{{- define "shared-storage.amlfs.warnings" -}}
{{- include "shared-storage.lustreWarnings" . }}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.amlfs.properties" . | fromJson }}
*/}}
{{- define "shared-storage.amlfs.properties" -}}
{{- $amlfs := .Values.amlfs | default dict -}}
{{- $address := $amlfs.mgsIpAddress -}}
{{- $fit := "" }}{{ with $amlfs.skuName }}{{ $fit = printf "%s:%s" (replace "AMLFS-Durable-Premium" "amlfs" .) (toJson (float64 $amlfs.storageCapacityTiB)) }}{{ end -}}
{{ dict "driver" "azurelustre.csi.azure.com" "sizeKey" "amlfs.storageCapacityTiB" "fit" $fit
      "source" (ternary (printf "the file system at %s" $address) "" (not (empty $address))) | toJson }}
{{- end }}
