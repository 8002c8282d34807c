{{/*
Azure Managed Lustre: a new file system, or one that is there. Input: $. Output: documents.
  {{ include "shared-storage.amlfs.volume" . }}
*/}}
{{- define "shared-storage.amlfs.volume" -}}
{{- $amlfs := .Values.amlfs -}}
{{- $options := .Values.storage.mountOptions | default (list "noatime" "flock") -}}
{{- $size := printf "%dTi" (int64 $amlfs.storageCapacityTiB) -}}
{{- if $amlfs.mgsIpAddress }}
{{- $attributes := include "shared-storage.parameters" (dict "of" $amlfs "names" (dict "mgs-ip-address" "mgsIpAddress" "sub-dir" "subDir")) | fromJson -}}
{{ include "shared-storage.static" (dict "root" . "size" $size "mountOptions" $options "spec" (dict "csi" (dict
      "driver" "azurelustre.csi.azure.com" "volumeHandle" (include "shared-storage.volumeName" .) "volumeAttributes" $attributes))) }}
{{- else }}
{{- $parameters := include "shared-storage.parameters" (dict "of" $amlfs "names" (dict
      "sku-name" "skuName" "zone" "zone" "maintenance-day-of-week" "maintenanceDayOfWeek"
      "maintenance-time-of-day-utc" "maintenanceTimeOfDayUtc" "location" "location" "resource-group-name" "resourceGroupName"
      "vnet-resource-group" "vnetResourceGroup" "vnet-name" "vnetName" "subnet-name" "subnetName"
      "identities" "identities" "tags" "tags" "sub-dir" "subDir")) | fromJson -}}
{{ include "shared-storage.dynamic" (dict "root" . "size" $size "provisioner" "azurelustre.csi.azure.com"
      "parameters" $parameters "mountOptions" $options "grows" false) }}
{{- end }}
{{- end }}

{{/*
Its rules: the service's steps and default maximum for each SKU (learn.microsoft.com, azure-managed-lustre, "Throughput
configurations"), and the driver's (docs/driver-parameters.md). Input: $. Output: nothing, or fails.
  {{ include "shared-storage.amlfs.rules" . }}
*/}}
{{- define "shared-storage.amlfs.rules" -}}
{{- $amlfs := .Values.amlfs -}}
{{- if contains "${pod." $amlfs.subDir }}
{{- fail (printf "\namlfs.subDir=%q differs from pod to pod, and the stages share one directory.\nLeave the pod out of it." $amlfs.subDir) }}
{{- end }}
{{- if $amlfs.mgsIpAddress }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "amlfs" "named" "mgsIpAddress" "keys" (list "zone" "maintenanceDayOfWeek"
      "maintenanceTimeOfDayUtc" "maximumCapacityTiB" "location" "resourceGroupName" "vnetResourceGroup" "vnetName" "subnetName" "identities" "tags")) }}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "amlfs" "keys" (list "storageCapacityTiB") "remedy" "Add --set amlfs.storageCapacityTiB=SIZE, that of the file system which is there.") }}
{{- if contains "${pv" $amlfs.subDir }}
{{- fail (printf "\namlfs.subDir=%q: the driver knows no claim and no volume beside amlfs.mgsIpAddress.\nWrite the directory's name." $amlfs.subDir) }}
{{- end }}
{{- else }}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "amlfs" "keys" (list "skuName" "storageCapacityTiB" "maintenanceDayOfWeek" "maintenanceTimeOfDayUtc")
      "remedy" "Add -f values/storage/amlfs.yaml, which sets them; for a file system that is there, -f values/storage/amlfs-static.yaml --set amlfs.mgsIpAddress=ADDRESS.") }}
{{- $size := int64 $amlfs.storageCapacityTiB }}
{{- $sku := trimPrefix "AMLFS-Durable-Premium-" $amlfs.skuName }}
{{- $step := index (dict "40" 48 "125" 16 "250" 8 "500" 4) $sku | int64 }}
{{- $most := $amlfs.maximumCapacityTiB | default (ternary 768 128 (eq $sku "40")) | int64 }}
{{- if mod $size $step }}
{{- $above := mul (add1 (div $size $step)) $step }}
{{- fail (printf "\namlfs.storageCapacityTiB=%d is no multiple of %d, the step of amlfs.skuName=%s: the file system would have, and cost, %d TiB.\nSet %s%d." $size $step $amlfs.skuName $above (ternary "" (printf "%d or " (sub $above $step)) (lt $size $step)) $above) }}
{{- end }}
{{- if gt $size $most }}
{{- fail (printf "\namlfs.storageCapacityTiB=%d is above %d, the most that %s for amlfs.skuName=%s.\nSet at most %d%s." $size $most (ternary "amlfs.maximumCapacityTiB allows" "a subscription gets unasked" (not (empty $amlfs.maximumCapacityTiB))) $amlfs.skuName $most (ternary "" (printf ", or, where Microsoft raised it for yours, --set amlfs.maximumCapacityTiB=%d" $size) (not (empty $amlfs.maximumCapacityTiB)))) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.amlfs.warnings" . }}
*/}}
{{- define "shared-storage.amlfs.warnings" -}}
{{- include "shared-storage.lustreWarnings" . }}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.amlfs.about" . | fromJson }}
*/}}
{{- define "shared-storage.amlfs.about" -}}
{{- $amlfs := .Values.amlfs | default dict -}}
{{- $there := $amlfs.mgsIpAddress -}}
{{- $fit := "" }}{{ with $amlfs.skuName }}{{ $fit = printf "%s:%s" (replace "AMLFS-Durable-Premium" "amlfs" .) (toJson (float64 $amlfs.storageCapacityTiB)) }}{{ end -}}
{{ dict "driver" "azurelustre.csi.azure.com" "sizeKey" "amlfs.storageCapacityTiB" "fit" $fit
      "source" (ternary (printf "the file system at %s" $there) "" (not (empty $there))) | toJson }}
{{- end }}
