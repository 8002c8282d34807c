{{/*
Amazon FSx for Lustre: a new file system, or one that is there. Input: $. Output: documents.
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
      "parameters" (include "shared-storage.parameters" (dict "of" $fsx "names" $names) | fromJson) "grows" (ne $fsx.deploymentType "SCRATCH_1")) }}
{{- end }}
{{- end }}

{{/*
What the service refuses (docs.aws.amazon.com, fsx, APIReference, "CreateFileSystemLustreConfiguration", and LustreGuide).
Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateNew" . }}
*/}}
{{- define "shared-storage.fsx.validateNew" -}}
{{- $fsx := .Values.fsx -}}
{{- $type := $fsx.deploymentType -}}
{{- $hdd := eq $fsx.storageType "HDD" -}}
{{- $second := eq $type "PERSISTENT_2" -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- $allowed := index (dict "PERSISTENT_2" (list 125 250 500 1000) "PERSISTENT_1" (ternary (list 12 40) (list 50 100 200) $hdd)) $type -}}
{{- $of := dict "of" $fsx "prefix" "fsx." -}}
{{- $backups := include "shared-storage.given" (set $of "keys" (list "automaticBackupRetentionDays" "copyTagsToBackups" "dailyAutomaticBackupStartTime")) -}}
{{- $s3 := include "shared-storage.given" (set $of "keys" (list "s3ImportPath" "s3ExportPath" "autoImportPolicy")) -}}
{{- $metadata := include "shared-storage.given" (set $of "keys" (list "metadataConfigurationMode" "metadataIops")) -}}
{{- $iops := $fsx.metadataIops | default 0 | int -}}
{{- $right := or (has $iops (list 1500 3000 6000)) (and (le $iops 192000) (gt $iops 0) (eq (mod $iops 12000) 0)) -}}
{{- $provisioned := eq $fsx.metadataConfigurationMode "USER_PROVISIONED" -}}
{{- $values := printf "which has %s MB/s for each TiB%s" (join ", " $allowed) (ternary " on HDD" "" $hdd) -}}
{{- range list
      (list (and $hdd (ne $type "PERSISTENT_1")) (printf "fsx.storageType=HDD is not allowed for fsx.deploymentType=%s." $type) "Set fsx.deploymentType=PERSISTENT_1, or take SSD.")
      (list (and $hdd (not $fsx.driveCacheType)) "fsx.storageType=HDD needs fsx.driveCacheType." "Set NONE or READ.")
      (list (and (not $hdd) $fsx.driveCacheType) (printf "fsx.driveCacheType=%s is for fsx.storageType=HDD." $fsx.driveCacheType) "Leave it out.")
      (list (and $throughput (not $allowed)) (printf "fsx.perUnitStorageThroughput=%d is not allowed for fsx.deploymentType=%s, which has 200 MB/s for each TiB." $throughput $type) "Add --set fsx.perUnitStorageThroughput=null, or choose a persistent type.")
      (list (and $allowed (not $throughput)) (printf "fsx.perUnitStorageThroughput is not set for fsx.deploymentType=%s, %s." $type $values) "Set one of them.")
      (list (and $allowed (not (has $throughput $allowed))) (printf "fsx.perUnitStorageThroughput=%d is not allowed for fsx.deploymentType=%s, %s." $throughput $type $values) "Set one of them.")
      (list (and $fsx.kmsKeyId (not $allowed)) (printf "fsx.kmsKeyId is not allowed for fsx.deploymentType=%s." $type) "Leave it out, or choose a persistent type.")
      (list (and $backups (or $s3 (not $allowed))) (printf "%s: there are no backups of a file system that is %s." $backups (ternary "linked to S3" "scratch" (not (empty $allowed)))) "Leave them out.")
      (list (and $s3 $second) (printf "%s cannot be set with fsx.deploymentType=PERSISTENT_2." $s3) "Choose SCRATCH_2 or PERSISTENT_1, or link the bucket when the file system is there: aws fsx create-data-repository-association.")
      (list (and $s3 (not $fsx.s3ImportPath)) (printf "%s needs fsx.s3ImportPath." $s3) "Set it, to the same bucket.")
      (list (and $fsx.s3ExportPath (ne (index (splitList "/" (printf "%s//" $fsx.s3ImportPath)) 2) (index (splitList "/" (printf "%s//" $fsx.s3ExportPath)) 2))) (printf "fsx.s3ExportPath=%s is in another bucket than fsx.s3ImportPath=%s." $fsx.s3ExportPath $fsx.s3ImportPath) "Give two paths in one bucket.")
      (list (and $metadata (not $second)) (printf "%s cannot be set with fsx.deploymentType=%s." $metadata $type) "Leave them out, or choose PERSISTENT_2.")
      (list (and $fsx.efaEnabled (not (and $second $fsx.metadataConfigurationMode))) "fsx.efaEnabled needs fsx.deploymentType=PERSISTENT_2 with fsx.metadataConfigurationMode." "Set both, AUTOMATIC for the second.")
      (list (and $iops (not $provisioned)) (printf "fsx.metadataIops=%d is for fsx.metadataConfigurationMode=USER_PROVISIONED." $iops) "Set that, or leave it out.")
      (list (and $provisioned (not $right)) (printf "fsx.metadataIops=%d is not allowed." $iops) "Set 1500, 3000, 6000 or a multiple of 12000 up to 192000.")
      (list (and $second (eq $fsx.fileSystemTypeVersion "2.10")) "fsx.fileSystemTypeVersion=2.10 is not allowed for fsx.deploymentType=PERSISTENT_2." "Set 2.12 or 2.15.")
      (list (and $metadata (eq (toString $fsx.fileSystemTypeVersion) "2.12")) "fsx.fileSystemTypeVersion=2.12 is not allowed with fsx.metadataConfigurationMode." "Set 2.15.") }}
{{- if first . }}{{ fail (printf "\n%s\n%s" (index . 1) (index . 2)) }}{{ end }}
{{- end }}
{{- end }}

{{/*
Steps of the capacity; the driver would round up to them. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.validateCapacity" . }}
*/}}
{{- define "shared-storage.fsx.validateCapacity" -}}
{{- $fsx := .Values.fsx -}}
{{- $size := int $fsx.storageCapacityGiB -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- $small := list 1200 -}}
{{- $step := 2400 -}}
{{- $why := printf "fsx.deploymentType=%s" $fsx.deploymentType -}}
{{- if eq $fsx.deploymentType "SCRATCH_1" }}{{ $small = list 1200 2400 }}{{ $step = 3600 }}{{ end -}}
{{- if eq $fsx.storageType "HDD" }}{{ $small = list }}{{ $step = ternary 6000 1800 (eq $throughput 12) }}{{ $why = printf "HDD with %d MB/s for each TiB" $throughput }}{{ end -}}
{{- if $fsx.efaEnabled }}{{ $small = list }}{{ $step = div 4800000 $throughput }}{{ $why = printf "EFA with %d MB/s for each TiB" $throughput }}{{ end -}}
{{- $step = int $step }}
{{- if and (mod $size $step) (not (has $size $small)) }}
{{- $above := mul (add1 (div $size $step)) $step }}
{{- $next := list }}
{{- range concat $small (list (sub $above $step) $above) }}{{ if gt (int64 .) 0 }}{{ $next = append $next (int .) }}{{ end }}{{ end }}
{{- fail (printf "\nfsx.storageCapacityGiB=%d is not allowed for %s, which has %smultiples of %d.\nSet %s." $size $why (ternary "" (printf "%s and " (join ", " $small)) (empty $small)) $step (join " or " $next)) }}
{{- end }}
{{- end }}

{{/*
Its rules. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.fsx.rules" . }}
*/}}
{{- define "shared-storage.fsx.rules" -}}
{{- $fsx := .Values.fsx -}}
{{- if or $fsx.volumeHandle $fsx.dnsName $fsx.mountName }}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "fsx" "keys" (list "volumeHandle" "dnsName" "mountName" "storageCapacityGiB")
      "remedy" "`aws fsx describe-file-systems` has them for a file system that is there: FileSystemId, DNSName, LustreConfiguration.MountName, StorageCapacity.") }}
{{- include "shared-storage.validateStatic" (dict "root" . "section" "fsx" "named" "volumeHandle" "keys" (without (keys $fsx | sortAlpha)
      "volumeHandle" "dnsName" "mountName" "storageCapacityGiB" "deploymentType" "perUnitStorageThroughput" "storageType")) }}
{{- else }}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "fsx" "keys" (list "subnetId" "securityGroupIds" "deploymentType" "storageCapacityGiB")
      "remedy" "Add -f values/storage/fsx.yaml and --set fsx.subnetId=subnet-... --set 'fsx.securityGroupIds={sg-...}', those of the nodes; for a file system that is there, -f values/storage/fsx-static.yaml.") }}
{{- include "shared-storage.fsx.validateNew" . }}
{{- include "shared-storage.fsx.validateCapacity" . }}
{{- end }}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.fsx.warnings" . }}
*/}}
{{- define "shared-storage.fsx.warnings" -}}
{{- include "shared-storage.lustreWarnings" . }}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.fsx.about" . | fromJson }}
*/}}
{{- define "shared-storage.fsx.about" -}}
{{- $fsx := .Values.fsx | default dict -}}
{{- $there := $fsx.volumeHandle -}}
{{- $kind := "" -}}
{{- $throughput := $fsx.perUnitStorageThroughput | default 0 | int -}}
{{- if has $throughput (list 12 40 50 100 125 200 250 500 1000) }}{{ $kind = printf "fsx-%d" $throughput }}{{ end -}}
{{- if hasPrefix "SCRATCH" ($fsx.deploymentType | default "") }}{{ $kind = "fsx-scratch" }}{{ end -}}
{{- with $kind }}{{ $kind = printf "%s:%s" . (toJson (divf (float64 $fsx.storageCapacityGiB) 1024.0)) }}{{ end -}}
{{ dict "driver" "fsx.csi.aws.com" "sizeKey" "fsx.storageCapacityGiB" "fit" $kind
      "source" (ternary (printf "the file system %s" $there) "" (not (empty $there))) | toJson }}
{{- end }}
