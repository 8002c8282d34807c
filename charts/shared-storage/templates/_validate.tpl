{{/*
Check the rules for all back ends, then those of the selected back end in its own file. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.validate" . }}
*/}}
{{- define "shared-storage.validate" -}}
{{- $values := .Values -}}
{{- $backends := .Files.Get "backends.json" | fromJsonArray -}}
{{- if not (has $values.backend $backends) }}
{{- fail (printf "\nbackend=%q is not a back end; the back ends are %s.\nSelect one with -f values/storage/NAME.yaml, or --set backend=NAME." $values.backend (join ", " $backends)) }}
{{- end }}
{{- if not (index $values $values.backend) }}
{{- fail (printf "\nbackend=%s needs its section of values, but %s is null.\nRemove the setting that makes it null." $values.backend $values.backend) }}
{{- end }}
{{- range $old, $new := dict "pvcName" "pvc.name" "size" "pvc.size, amlfs.storageCapacityTiB or fsx.storageCapacityGiB" "skuName" "blob.skuName" "amlfs" "amlfs, at the root of the values" }}
{{- if hasKey $values.storage $old }}
{{- fail (printf "\nstorage.%s is not a value of this chart.\nSet %s instead." $old $new) }}
{{- end }}
{{- end }}
{{- range $section := without $backends $values.backend }}
{{- with include "shared-storage.setKeys" (dict "section" (index $values $section | default dict) "prefix" (printf "%s." $section)) }}
{{- fail (printf "\nbackend=%s does not read %s.\nSet backend=%s (-f values/storage/%s.yaml does), or remove the keys of %s." $values.backend . $section $section $section) }}
{{- end }}
{{- end }}
{{- $properties := include "shared-storage.properties" . | fromJson }}
{{- if and $values.pvc.size $properties.sizeKey }}
{{- fail (printf "\npvc.size=%v is not read with backend=%s, whose size is %s.\nSet that key and remove pvc.size." $values.pvc.size $values.backend $properties.sizeKey) }}
{{- end }}
{{- if and (not (kindIs "invalid" $values.storage.mountOptions)) $properties.noMountOptions }}
{{- fail (printf "\nstorage.mountOptions is not read with backend=%s: %s.\nRemove it, or select a back end with mount options, for example -f values/storage/blob.yaml." $values.backend $properties.noMountOptions) }}
{{- end }}
{{- if and $values.storage.parameters (not $properties.driver) }}
{{- fail (printf "\nstorage.parameters applies to a StorageClass, but backend=%s does not create one.\nRemove it." $values.backend) }}
{{- end }}
{{- include (printf "shared-storage.%s.rules" $values.backend) . }}
{{- end }}

{{/*
Return the keys of a section that are set, including those of its subsections. Input: dict "section" a dict, "prefix" of the
returned names, "keys" to check (all by default). Output: names, comma-separated, or nothing.
  {{ include "shared-storage.setKeys" (dict "section" .Values.amlfs "prefix" "amlfs." "keys" (list "zone")) }}
*/}}
{{- define "shared-storage.setKeys" -}}
{{- $setKeys := list }}
{{- range $key := .keys | default (keys .section | sortAlpha) }}
{{- $value := index $.section $key }}
{{- if kindIs "map" $value }}
{{- with include "shared-storage.setKeys" (dict "section" $value "prefix" (printf "%s%s." $.prefix $key)) }}{{ $setKeys = append $setKeys . }}{{ end }}
{{- else if not (has (toJson $value) (list "null" "\"\"" "[]")) }}
{{- $setKeys = append $setKeys (printf "%s%s" $.prefix $key) }}
{{- end }}
{{- end }}
{{- join ", " $setKeys }}
{{- end }}

{{/*
Refuse keys for a new volume together with a key that names an existing one. Input: dict "root" $ "section" its name, "named"
the key that names the existing storage, "keys" for new storage. Output: nothing, or fails.
  {{ include "shared-storage.validateStatic" (dict "root" . "section" "amlfs" "named" "mgsIpAddress" "keys" (list "zone")) }}
*/}}
{{- define "shared-storage.validateStatic" -}}
{{- $section := index .root.Values .section }}
{{- $newKeys := include "shared-storage.setKeys" (dict "section" $section "prefix" (printf "%s." .section) "keys" .keys) }}
{{- $newParameters := include "shared-storage.setKeys" (dict "section" .root.Values.storage "prefix" "storage." "keys" (list "parameters")) }}
{{- with join ", " (compact (list $newKeys $newParameters)) }}
{{- fail (printf "\n%s.%s=%s names existing storage, but %s would create a new one.\nRemove the first key or the others; -f values/storage/%s-static.yaml, used instead of %s.yaml, sets none of the others." $.section $.named (index $section $.named) . $.section $.section) }}
{{- end }}
{{- end }}

{{/*
Check that the required keys of a back end are set. Input: dict "root" $ "section" "keys" "remedy". Output: nothing, or fails.
  {{ include "shared-storage.validateRequired" (dict "root" . "section" "nfs" "keys" (list "server" "path") "remedy" "Add ...") }}
*/}}
{{- define "shared-storage.validateRequired" -}}
{{- $missing := list }}
{{- range .keys }}
{{- if not (include "shared-storage.setKeys" (dict "section" (index $.root.Values $.section) "prefix" "" "keys" (list .))) }}{{ $missing = append $missing (printf "%s.%s" $.section .) }}{{ end }}
{{- end }}
{{- with $missing }}
{{- fail (printf "\nbackend=%s needs %s.\n%s" $.root.Values.backend (join ", " .) $.remedy) }}
{{- end }}
{{- end }}
