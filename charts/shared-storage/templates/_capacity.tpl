{{/*
What the back end takes and holds, as `tokenmill fit --storage` names it. Input: $. Output: JSON with "name" (amlfs-125:16),
"speed" in bytes a second and "bytes", each only where it is known.
  {{ include "shared-storage.capacity" . | fromJson }}
*/}}
{{- define "shared-storage.capacity" -}}
{{- $figures := .Files.Get "figures.json" | fromJson -}}
{{- $kind := "" }}{{ $tib := 0.0 -}}
{{- if eq .Values.backend "amlfs" }}
{{- with .Values.amlfs.skuName }}{{ $kind = replace "AMLFS-Durable-Premium" "amlfs" . }}{{ end }}
{{- $tib = float64 .Values.amlfs.storageCapacityTiB }}
{{- else if eq .Values.backend "fsx" }}
{{- with .Values.fsx.perUnitStorageThroughput }}{{ $kind = printf "fsx-%d" (int64 .) }}{{ end }}
{{- if hasPrefix "SCRATCH" .Values.fsx.deploymentType }}{{ $kind = "fsx-scratch" }}{{ end }}
{{- $tib = divf (float64 .Values.fsx.storageCapacityGiB) 1024.0 }}
{{- end -}}
{{- $found := dict -}}
{{- with get $figures.megabytesPerSecondPerTib $kind }}
{{- $found = dict "name" (printf "%s:%s" $kind (toJson $tib)) "speed" (mulf . $tib 1000000.0) }}
{{- end -}}
{{- if $tib }}{{ $_ := set $found "bytes" (mulf $tib 1024.0 1024.0 1024.0 1024.0) }}{{ end -}}
{{- if eq .Values.backend "blob" }}{{ $found = dict "name" "blob" "speed" (divf (mulf $figures.blobGigabitsPerSecond 1000000000.0) 8.0) }}{{ end -}}
{{- toJson $found }}
{{- end }}

{{/*
Checkpoints of some models on it: their size, how long one takes to write, the save interval at which saving and repeating
lost work cost least, sqrt(2 T M) (Young 1974), and how many find room. Input: $. Output: lines, or none.
  {{ include "shared-storage.checkpoints" . }}
*/}}
{{- define "shared-storage.checkpoints" -}}
{{- $figures := .Files.Get "figures.json" | fromJson -}}
{{- $on := include "shared-storage.capacity" . | fromJson -}}
{{- if $on.speed }}
It takes {{ printf "%.1f" (divf $on.speed 1000000000.0) }} GB/s from all nodes together{{ with $on.bytes }} and holds {{ include "shared-storage.amount" . }}{{ end }}. Checkpoints on it, for nodes of 8 GPUs:

  {{ printf "%-12s %5s %12s %14s %14s" "model" "nodes" "checkpoint" "written in" "save every" }}{{ if $on.bytes }} {{ printf "%10s" "room for" }}{{ end }}
{{- range $figures.models }}
{{- $size := .checkpointBytes }}
{{- $write := divf $size $on.speed }}
{{- $failure := divf (mulf $figures.nodeHours 3600.0) (float64 .nodes) }}
{{- $interval := include "shared-storage.squareRoot" (mulf 2.0 $write $failure) | float64 }}
{{- if lt $interval $write }}{{ $interval = $write }}{{ end }}
  {{ printf "%-12s %5d %12s %14s %14s" .name (int64 .nodes) (include "shared-storage.amount" $size) (include "shared-storage.duration" $write) (include "shared-storage.duration" $interval) }}
{{- with $on.bytes }} {{ printf "%10d" (max 0 (int64 (floor (divf (subf . $figures.corpusBytes.tokens) $size)))) }}{{ end }}
{{- end }}
{{ with $on.bytes }}{{ $all := addf $figures.corpusBytes.downloaded $figures.corpusBytes.extracted $figures.corpusBytes.tokens }}
Room is beside SlimPajama 627B as tokens, {{ include "shared-storage.amount" $figures.corpusBytes.tokens }}{{ if lt . $figures.corpusBytes.tokens }}, which find none{{ end }}. With its download and text it is {{ include "shared-storage.amount" $all }}, which {{ ternary "does not fit" "fits" (lt . $all) }}; dataset.stream keeps the tokens alone.{{ end }}
Of your run: tokenmill fit --model NAME --gpus N --gpu-memory GIB --storage {{ $on.name }} --data TB
{{- else }}
How fast it is, {{ ternary "the node's disk" "its server" (eq .Values.backend "local") }} decides. What a checkpoint needs: tokenmill fit --model NAME --gpus N --gpu-memory GIB --write-bandwidth GB/S --capacity TB --data TB
{{- end }}
{{- end }}

{{/*
A square root, by Newton's rule, which halves the exponent's error at each step. Input: a number above 0. Output: a number.
  {{ include "shared-storage.squareRoot" 2.0 }}
*/}}
{{- define "shared-storage.squareRoot" -}}
{{- $root := addf . 1.0 }}
{{- range until 40 }}{{ $root = divf (addf $root (divf $ $root)) 2.0 }}{{ end }}
{{- printf "%f" $root }}
{{- end }}

{{/*
Seconds and bytes in words. Input: a number. Output: 20 min 22 s; 2.40 TB, 18.4 GB.
  {{ include "shared-storage.duration" 1222.2 }} {{ include "shared-storage.amount" 2.4e12 }}
*/}}
{{- define "shared-storage.duration" -}}
{{- $whole := int64 (floor .) }}
{{- if lt $whole 60 }}{{ printf "%.1f s" . }}
{{- else if lt $whole 3600 }}{{ printf "%d min %02d s" (div $whole 60) (mod $whole 60) }}
{{- else }}{{ printf "%d h %02d min" (div $whole 3600) (div (mod $whole 3600) 60) }}
{{- end }}
{{- end }}
{{- define "shared-storage.amount" -}}
{{- if ge . 1000000000000.0 }}{{ printf "%.2f TB" (divf . 1000000000000.0) }}{{ else }}{{ printf "%.1f GB" (divf . 1000000000.0) }}{{ end }}
{{- end }}
