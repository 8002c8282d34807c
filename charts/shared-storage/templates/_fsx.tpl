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
Refuse settings that the service refuses (docs.aws.amazon.com, fsx, APIReference, "CreateFileSystemLustreConfiguration", and
LustreGuide). Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateNew" . }}
*/}}
{{- define "shared-storage.fsx.validateNew" -}}
{{- $fsx := .Values.fsx -}}
{{- $type := $fsx.deploymentType -}}
{{- $hdd := eq $fsx.storageType "HDD" -}}
{{- $persistent2 := eq $type "PERSISTENT_2" -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- $allowed := index (dict "PERSISTENT_2" (list 125 250 500 1000) "PERSISTENT_1" (ternary (list 12 40) (list 50 100 200) $hdd)) $type -}}
{{- $query := dict "section" $fsx "prefix" "fsx." -}}
{{- $backups := include "shared-storage.setKeys" (set $query "keys" (list "automaticBackupRetentionDays" "copyTagsToBackups" "dailyAutomaticBackupStartTime")) -}}
{{- $s3 := include "shared-storage.setKeys" (set $query "keys" (list "s3ImportPath" "s3ExportPath" "autoImportPolicy")) -}}
{{- $metadata := include "shared-storage.setKeys" (set $query "keys" (list "metadataConfigurationMode" "metadataIops")) -}}
{{- $iops := $fsx.metadataIops | default 0 | int -}}
{{- $iopsAllowed := or (has $iops (list 1500 3000 6000)) (and (le $iops 192000) (gt $iops 0) (eq (mod $iops 12000) 0)) -}}
{{- $provisioned := eq $fsx.metadataConfigurationMode "USER_PROVISIONED" -}}
{{- $values := printf "which allows %s MB/s per TiB%s" (join ", " $allowed) (ternary " on HDD" "" $hdd) -}}
{{- range list
      (list (and $hdd (ne $type "PERSISTENT_1")) (printf "fsx.storageType=HDD is not allowed for fsx.deploymentType=%s." $type) "Set fsx.deploymentType=PERSISTENT_1, or fsx.storageType=SSD.")
      (list (and $hdd (not $fsx.driveCacheType)) "fsx.storageType=HDD needs fsx.driveCacheType." "Set it to NONE or READ.")
      (list (and (not $hdd) $fsx.driveCacheType) (printf "fsx.driveCacheType=%s applies only to fsx.storageType=HDD." $fsx.driveCacheType) "Remove it.")
      (list (and $throughput (not $allowed)) (printf "fsx.perUnitStorageThroughput=%d is not allowed for fsx.deploymentType=%s, which always has 200 MB/s per TiB." $throughput $type) "Add --set fsx.perUnitStorageThroughput=null, or choose a persistent type.")
      (list (and $allowed (not $throughput)) (printf "fsx.perUnitStorageThroughput is not set for fsx.deploymentType=%s, %s." $type $values) "Set it to one of them.")
      (list (and $allowed (not (has $throughput $allowed))) (printf "fsx.perUnitStorageThroughput=%d is not allowed for fsx.deploymentType=%s, %s." $throughput $type $values) "Set it to one of them.")
      (list (and $fsx.kmsKeyId (not $allowed)) (printf "fsx.kmsKeyId is not allowed for fsx.deploymentType=%s." $type) "Remove it, or choose a persistent type.")
      (list (and $backups (or $s3 (not $allowed))) (printf "%s cannot be set: FSx makes no backups of a %s." $backups (ternary "file system linked to S3" "scratch file system" (not (empty $allowed)))) "Remove them.")
      (list (and $s3 $persistent2) (printf "%s cannot be set with fsx.deploymentType=PERSISTENT_2." $s3) "Choose SCRATCH_2 or PERSISTENT_1, or link the bucket after the file system exists: aws fsx create-data-repository-association.")
      (list (and $s3 (not $fsx.s3ImportPath)) (printf "%s needs fsx.s3ImportPath." $s3) "Set it to a path in the same bucket.")
      (list (and $fsx.s3ExportPath (ne (index (splitList "/" (printf "%s//" $fsx.s3ImportPath)) 2) (index (splitList "/" (printf "%s//" $fsx.s3ExportPath)) 2))) (printf "fsx.s3ExportPath=%s is in another bucket than fsx.s3ImportPath=%s." $fsx.s3ExportPath $fsx.s3ImportPath) "Set two paths in the same bucket.")
      (list (and $metadata (not $persistent2)) (printf "%s cannot be set with fsx.deploymentType=%s." $metadata $type) "Remove them, or choose PERSISTENT_2.")
      (list (and $fsx.efaEnabled (not (and $persistent2 $fsx.metadataConfigurationMode))) "fsx.efaEnabled needs fsx.deploymentType=PERSISTENT_2 with fsx.metadataConfigurationMode." "Set both; AUTOMATIC is enough for the second.")
      (list (and $iops (not $provisioned)) (printf "fsx.metadataIops=%d applies only to fsx.metadataConfigurationMode=USER_PROVISIONED." $iops) "Set that mode, or remove fsx.metadataIops.")
      (list (and $provisioned (not $iopsAllowed)) (printf "fsx.metadataIops=%d is not allowed." $iops) "Set it to 1500, 3000, 6000 or a multiple of 12000 up to 192000.")
      (list (and $persistent2 (eq $fsx.fileSystemTypeVersion "2.10")) "fsx.fileSystemTypeVersion=2.10 is not allowed for fsx.deploymentType=PERSISTENT_2." "Set it to 2.12 or 2.15.")
      (list (and $metadata (eq (toString $fsx.fileSystemTypeVersion) "2.12")) "fsx.fileSystemTypeVersion=2.12 is not allowed with fsx.metadataConfigurationMode." "Set it to 2.15.") }}
{{- if first . }}{{ fail (printf "\n%s\n%s" (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- end }}

{{/*
Check the capacity, which the driver would round up to the next step. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateCapacity" . }}
*/}}
{{- define "shared-storage.fsx.validateCapacity" -}}
{{- $fsx := .Values.fsx -}}
{{- $size := int $fsx.storageCapacityGiB -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- $smallSizes := list 1200 -}}
{{- $step := 2400 -}}
{{- $reason := printf "fsx.deploymentType=%s" $fsx.deploymentType -}}
{{- if eq $fsx.deploymentType "SCRATCH_1" }}{{ $smallSizes = list 1200 2400 }}{{ $step = 3600 }}{{ end -}}
{{- if eq $fsx.storageType "HDD" }}{{ $smallSizes = list }}{{ $step = ternary 6000 1800 (eq $throughput 12) }}{{ $reason = printf "HDD with %d MB/s per TiB" $throughput }}{{ end -}}
{{- if $fsx.efaEnabled }}{{ $smallSizes = list }}{{ $step = div 4800000 $throughput }}{{ $reason = printf "EFA with %d MB/s per TiB" $throughput }}{{ end -}}
{{- $step = int $step }}
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
