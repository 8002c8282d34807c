{{/*
What holds for all back ends; each back end's own rules stand in its file. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.validate" . }}
*/}}
{{- define "shared-storage.validate" -}}
{{- $values := .Values -}}
{{- $backends := .Files.Get "backends.json" | fromJsonArray -}}
{{- if not (has $values.backend $backends) }}
{{- fail (printf "\nbackend=%q: there is no such back end; there are %s.\nTake one with -f values/storage/NAME.yaml, or --set backend=NAME." $values.backend (join ", " $backends)) }}
{{- end }}
{{- if not (index $values $values.backend) }}
{{- fail (printf "\nbackend=%s needs its section of values, and %s is null.\nTake out what sets it so." $values.backend $values.backend) }}
{{- end }}
{{- range $old, $new := dict "pvcName" "pvc.name" "size" "pvc.size, amlfs.storageCapacityTiB or fsx.storageCapacityGiB" "skuName" "blob.skuName" "amlfs" "amlfs, at the root of the values" }}
{{- if hasKey $values.storage $old }}
{{- fail (printf "\nstorage.%s is not a value of this chart.\nSet %s instead." $old $new) }}
{{- end }}
{{- end }}
{{- range $section := without $backends $values.backend }}
{{- with include "shared-storage.given" (dict "of" (index $values $section | default dict) "prefix" (printf "%s." $section)) }}
{{- fail (printf "\nbackend=%s does not read %s.\nSet backend=%s (-f values/storage/%s.yaml does), or leave out what is %s's." $values.backend . $section $section $section) }}
{{- end }}
{{- end }}
{{- $about := include "shared-storage.about" . | fromJson }}
{{- if and $values.pvc.size $about.sizeKey }}
{{- fail (printf "\npvc.size=%v is not read with backend=%s, whose size is %s.\nSet that and leave out pvc.size." $values.pvc.size $values.backend $about.sizeKey) }}
{{- end }}
{{- if and (not (kindIs "invalid" $values.storage.mountOptions)) $about.noMountOptions }}
{{- fail (printf "\nstorage.mountOptions are not read with backend=%s: %s.\nLeave them out, or choose the back end that they are for, as -f values/storage/blob.yaml does." $values.backend $about.noMountOptions) }}
{{- end }}
{{- if and $values.storage.parameters (not $about.driver) }}
{{- fail (printf "\nstorage.parameters are a StorageClass's, and backend=%s makes none.\nLeave them out." $values.backend) }}
{{- end }}
{{- include (printf "shared-storage.%s.rules" $values.backend) . }}
{{- end }}

{{/*
Which of a section's keys are set, those of its own sections as well. Input: dict "of" a section, "prefix" of what to call
them, "keys" to look at (all when left out). Output: their names with commas, or nothing.
  {{ include "shared-storage.given" (dict "of" .Values.amlfs "prefix" "amlfs." "keys" (list "zone")) }}
*/}}
{{- define "shared-storage.given" -}}
{{- $found := list }}
{{- range $key := .keys | default (keys .of | sortAlpha) }}
{{- $value := index $.of $key }}
{{- if kindIs "map" $value }}
{{- with include "shared-storage.given" (dict "of" $value "prefix" (printf "%s%s." $.prefix $key)) }}{{ $found = append $found . }}{{ end }}
{{- else if not (has (toJson $value) (list "null" "\"\"" "[]")) }}
{{- $found = append $found (printf "%s%s" $.prefix $key) }}
{{- end }}
{{- end }}
{{- join ", " $found }}
{{- end }}

{{/*
What was meant to make a volume, beside one that is there. Input: dict "root" $ "section" its name, "named" the key that
names what is there, "keys" that say how to make one. Output: nothing, or fails.
  {{ include "shared-storage.validateStatic" (dict "root" . "section" "amlfs" "named" "mgsIpAddress" "keys" (list "zone")) }}
*/}}
{{- define "shared-storage.validateStatic" -}}
{{- $section := index .root.Values .section }}
{{- $given := include "shared-storage.given" (dict "of" $section "prefix" (printf "%s." .section) "keys" .keys) }}
{{- $more := include "shared-storage.given" (dict "of" .root.Values.storage "prefix" "storage." "keys" (list "parameters")) }}
{{- with join ", " (compact (list $given $more)) }}
{{- fail (printf "\n%s.%s=%s names what is there, and %s would make another.\nLeave out the one or the others; -f values/storage/%s-static.yaml in place of %s.yaml sets none of them." $.section $.named (index $section $.named) . $.section $.section) }}
{{- end }}
{{- end }}

{{/*
Keys that a back end cannot do without. Input: dict "root" $ "section" "keys" "remedy". Output: nothing, or fails.
  {{ include "shared-storage.validateNeeded" (dict "root" . "section" "nfs" "keys" (list "server" "path") "remedy" "Add ...") }}
*/}}
{{- define "shared-storage.validateNeeded" -}}
{{- $missing := list }}
{{- range .keys }}
{{- if not (include "shared-storage.given" (dict "of" (index $.root.Values $.section) "prefix" "" "keys" (list .))) }}{{ $missing = append $missing (printf "%s.%s" $.section .) }}{{ end }}
{{- end }}
{{- with $missing }}
{{- fail (printf "\nbackend=%s needs %s.\n%s" $.root.Values.backend (join ", " .) $.remedy) }}
{{- end }}
{{- end }}
