{{/*
Return the objects for Amazon FSx for Lustre: a new file system, or an existing one. Input: $. Output: documents.
  {{ include "shared-storage.fsx.volume" . }}
*/}}
{{- define "shared-storage.fsx.volume" -}}
{{- $fsx := .Values.fsx -}}
{{- $options := .Values.storage.mountOptions | default (list "noatime" "flock") -}}
{{- if or $fsx.volumeHandle $fsx.dnsName $fsx.mountName }}
{{- $attributes := dict "dnsname" $fsx.dnsName "mountname" $fsx.mountName -}}
{{ include "shared-storage.static" (dict "root" . "size" (printf "%dGi" (int64 $fsx.storageCapacityGiB)) "mountOptions" $options
      "spec" (dict "csi" (dict "driver" "fsx.csi.aws.com" "volumeHandle" $fsx.volumeHandle "volumeAttributes" $attributes))) }}
{{- else }}
{{- $names := dict }}
{{- range without (keys $fsx | sortAlpha) "storageCapacityGiB" "volumeHandle" "dnsName" "mountName" }}{{ $_ := set $names . . }}{{ end -}}
{{ include "shared-storage.dynamic" (dict "root" . "size" (printf "%dGi" (int64 $fsx.storageCapacityGiB)) "provisioner" "fsx.csi.aws.com" "mountOptions" $options
      "parameters" (include "shared-storage.parameters" (dict "section" $fsx "names" $names) | fromJson) "grows" (ne $fsx.deploymentType "SCRATCH_1")) }}
{{- end }}
{{- end }}

{{/*
Refuse settings that the service or the driver may accept without an effect, although they protect the data or cost money.
AWS refuses other combinations itself, as a message of the claim. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateNew" . }}
*/}}
{{- define "shared-storage.fsx.validateNew" -}}
{{- $fsx := .Values.fsx -}}
{{- $scratch := hasPrefix "SCRATCH" $fsx.deploymentType -}}
{{- $query := dict "section" $fsx "prefix" "fsx." -}}
{{- $backups := include "shared-storage.setKeys" (set $query "keys" (list "automaticBackupRetentionDays" "copyTagsToBackups" "dailyAutomaticBackupStartTime")) -}}
{{- range list
      (list (and $fsx.kmsKeyId $scratch) (printf "fsx.kmsKeyId is not allowed for fsx.deploymentType=%s." $fsx.deploymentType) "Remove it, or choose a persistent type.")
      (list (and $backups (or $fsx.s3ImportPath $scratch)) (printf "%s cannot be set: FSx makes no backups of a %s." $backups (ternary "scratch file system" "file system linked to S3" $scratch)) "Remove them.")
      (list (and $fsx.metadataIops (not $fsx.metadataConfigurationMode)) (printf "fsx.metadataIops=%d is read only with fsx.metadataConfigurationMode." (int $fsx.metadataIops)) "Set fsx.metadataConfigurationMode=USER_PROVISIONED, or remove fsx.metadataIops.") }}
{{- if first . }}{{ fail (printf "\n%s\n%s" (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- end }}

{{/*
Check the capacity, which the driver would round up to the next step (RoundUpVolumeSize of its pkg/util): AWS would bill the
larger file system, which cannot shrink. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateCapacity" . }}
*/}}
{{- define "shared-storage.fsx.validateCapacity" -}}
{{- $fsx := .Values.fsx -}}
{{- $size := int $fsx.storageCapacityGiB -}}
{{- $smallSizes := list 1200 -}}
{{- $step := 2400 -}}
{{- $reason := printf "fsx.deploymentType=%s" $fsx.deploymentType -}}
{{- if eq $fsx.deploymentType "SCRATCH_1" }}{{ $smallSizes = list 1200 2400 }}{{ $step = 3600 }}{{ end -}}
{{- if eq $fsx.storageType "HDD" }}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int }}
{{- $smallSizes = list }}{{ $step = ternary 6000 1800 (eq $throughput 12) }}{{ $reason = printf "HDD with %d MB/s per TiB" $throughput }}
{{- end -}}
{{- if and (mod $size $step) (not (has $size $smallSizes)) }}
{{- $nextSize := mul (add1 (div $size $step)) $step }}
{{- $nearest := list }}
{{- range concat $smallSizes (list (sub $nextSize $step) $nextSize) }}{{ if gt (int64 .) 0 }}{{ $nearest = append $nearest (int .) }}{{ end }}{{ end }}
{{- fail (printf "\nfsx.storageCapacityGiB=%d is not allowed for %s, which allows %smultiples of %d.\nSet it to %s." $size $reason (ternary "" (printf "%s and " (join ", " $smallSizes)) (empty $smallSizes)) $step (join " or " $nearest)) }}
{{- end }}
{{- end }}

{{/*
Check the section of this back end. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.rules" . }}
*/}}
{{- define "shared-storage.fsx.rules" -}}
{{- $fsx := .Values.fsx -}}
{{- if or $fsx.volumeHandle $fsx.dnsName $fsx.mountName }}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "fsx" "keys" (list "volumeHandle" "dnsName" "mountName" "storageCapacityGiB")
      "remedy" "Set them to the values of the existing file system, from `aws fsx describe-file-systems`: FileSystemId, DNSName, LustreConfiguration.MountName, StorageCapacity.") }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "fsx" "named" "volumeHandle" "keys" (without (keys $fsx | sortAlpha)
      "volumeHandle" "dnsName" "mountName" "storageCapacityGiB" "deploymentType" "perUnitStorageThroughput" "storageType")) }}
{{- else }}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "fsx" "keys" (list "subnetId" "securityGroupIds" "deploymentType" "storageCapacityGiB")
      "remedy" "Add -f values/storage/fsx.yaml and --set fsx.subnetId=subnet-... --set 'fsx.securityGroupIds={sg-...}', those of the nodes. For an existing file system: -f values/storage/fsx-static.yaml.") }}
{{- include "shared-storage.fsx.validateNew" . }}
{{- include "shared-storage.fsx.validateCapacity" . }}
{{- end }}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.fsx.warnings" . }}
*/}}
{{- define "shared-storage.fsx.warnings" -}}
{{- include "shared-storage.lustreWarnings" . }}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.fsx.properties" . | fromJson }}
*/}}
{{- define "shared-storage.fsx.properties" -}}
{{- $fsx := .Values.fsx | default dict -}}
{{- $fileSystem := $fsx.volumeHandle -}}
{{- $fit := "" -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- if has $throughput (list 12 40 50 100 125 200 250 500 1000) }}{{ $fit = printf "fsx-%d" $throughput }}{{ end -}}
{{- if hasPrefix "SCRATCH" ($fsx.deploymentType | default "") }}{{ $fit = "fsx-scratch" }}{{ end -}}
{{- with $fit }}{{ $fit = printf "%s:%s" . (toJson (divf (float64 $fsx.storageCapacityGiB) 1024.0)) }}{{ end -}}
{{ dict "driver" "fsx.csi.aws.com" "sizeKey" "fsx.storageCapacityGiB" "fit" $fit
      "source" (ternary (printf "the file system %s" $fileSystem) "" (not (empty $fileSystem))) | toJson }}
{{- end }}
