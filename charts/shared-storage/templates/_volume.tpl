{{/*
Return a StorageClass that only this release uses, and a claim on it that outlives the release, with the data.
Input: dict "root" $ "size" "provisioner" "parameters" "mountOptions" "grows". Output: documents.
  {{ include "shared-storage.dynamic" (dict "root" . "size" "16Ti" "provisioner" "fsx.csi.aws.com" "parameters" dict "mountOptions" list "grows" true) }}
*/}}
{{- define "shared-storage.dynamic" -}}
{{- $name := include "shared-storage.className" .root -}}
{{- $extra := .root.Values.storage.parameters | default dict -}}
{{- range $key, $value := .parameters }}
{{- range keys $extra | sortAlpha }}
{{- if eq (lower .) (lower $key) }}
{{- fail (printf "\nstorage.parameters.%s contradicts %s=%q, which the chart derives from the section %s.\nSet the key in that section, and remove it from storage.parameters." . $key $value $.root.Values.backend) }}
{{- end }}
{{- end }}
{{- end }}
{{- $parameters := merge (dict) $extra .parameters -}}
{{- range $key, $value := $parameters }}{{ $_ := set $parameters $key (include "shared-storage.parameterText" $value) }}{{ end -}}
{{- with lookup "storage.k8s.io/v1" "StorageClass" "" $name }}
{{- if ne .provisioner $.provisioner }}
{{- fail (include "shared-storage.driverMismatch" (dict "object" (printf "the StorageClass %q" $name) "existing" .provisioner "requested" $.provisioner "root" $.root)) }}
{{- end }}
{{- $existingParameters := .parameters | default dict }}
{{- range $key := concat (keys $existingParameters) (keys $parameters) | uniq | sortAlpha }}
{{- if ne (toJson (get $existingParameters $key)) (toJson (get $parameters $key)) }}
{{- fail (printf "\nthe StorageClass %q exists with %s=%q, and neither it nor its volume can be changed to %q.\nUse the values it was created with, or create another volume: helm install OTHER charts/shared-storage --set pvc.name=OTHER, with these values." $name $key (get $existingParameters $key) (get $parameters $key)) }}
{{- end }}
{{- end }}
{{- end -}}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
provisioner: {{ .provisioner }}
parameters: {{- toYaml $parameters | nindent 2 }}
mountOptions: {{- toYaml .mountOptions | nindent 2 }}
reclaimPolicy: Retain
volumeBindingMode: Immediate
allowVolumeExpansion: {{ .grows }}
{{ include "shared-storage.claim" (dict "root" .root "size" .size "storageClassName" $name "volumeName" "" "keep" true "grows" .grows
      "provisioner" .provisioner "parameters" $parameters) }}
{{- end }}

{{/*
Return a PersistentVolume for existing storage, and its claim. Both are deleted with the release, because a volume that
outlives its claim can never be bound again; the files remain.
Input: dict "root" $ "size" "spec" of its source, "mountOptions". Output: documents.
  {{ include "shared-storage.static" (dict "root" . "size" "1Ti" "spec" (dict "nfs" (dict "server" "s" "path" "/")) "mountOptions" list) }}
*/}}
{{- define "shared-storage.static" -}}
{{- $name := include "shared-storage.volumeName" .root -}}
{{- $claim := .root.Values.pvc.name -}}
{{- $namespace := .root.Release.Namespace -}}
{{- with lookup "v1" "PersistentVolumeClaim" $namespace $claim }}
{{- if ne (.spec.volumeName | default "") $name }}
{{- fail (printf "\nthe PVC %q exists in namespace %s with another volume, and a PVC cannot be changed.\nDelete it after you have checked that it holds no data (kubectl delete pvc %s -n %s), or choose another name: --set pvc.name=NAME." $claim $namespace $claim $namespace) }}
{{- end }}
{{- end }}
{{- $volume := lookup "v1" "PersistentVolume" "" $name }}
{{- if ($volume.metadata).deletionTimestamp }}
{{- fail (printf "\nthe volume %q is still being deleted.\nWait for its end: kubectl wait --for=delete pv/%s --timeout=5m" $name $name) }}
{{- end }}
{{- if eq ($volume.status).phase "Released" }}
{{- fail (printf "\nthe volume %q belongs to a deleted PVC, and can never be bound again.\nDelete the volume, which keeps its files: kubectl delete pv %s" $name $name) }}
{{- end }}
{{- $existingSpec := $volume.spec }}
{{- range $key, $part := ternary .spec dict (not (empty $existingSpec)) }}
{{- if ne (toJson (index $existingSpec $key)) (toJson $part) }}
{{- fail (printf "\nthe volume %q exists with %s=%s, which cannot be changed to %s.\nUse the values it was created with, or set pvc.name to create another volume." $name $key (toJson (index $existingSpec $key)) (toJson $part)) }}
{{- end }}
{{- end -}}
---
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
spec:
  capacity: {storage: {{ .size | quote }}}
  accessModes: {{- toYaml .root.Values.pvc.accessModes | nindent 4 }}
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {namespace: {{ $namespace | quote }}, name: {{ $claim | quote }}}
  {{- with .mountOptions }}
  mountOptions: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- toYaml .spec | nindent 2 }}
{{ include "shared-storage.claim" (dict "root" .root "size" .size "storageClassName" "" "volumeName" $name "keep" false "grows" false) }}
{{- end }}

{{/*
Return names for a StorageClass and a volume that no other release has: a namespace contains no dot, so that the first dot
ends it. Input: $. Output: a name.
  {{ include "shared-storage.className" . }}
*/}}
{{- define "shared-storage.className" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}
{{- define "shared-storage.volumeName" -}}
{{ .Release.Namespace }}.{{ .Values.pvc.name }}
{{- end }}

{{/*
Return the parameters of a driver that are set. Input: dict "section" a dict, "names" dict of parameter to key. Output: JSON.
  {{ include "shared-storage.parameters" (dict "section" .Values.amlfs "names" (dict "sku-name" "skuName")) | fromJson }}
*/}}
{{- define "shared-storage.parameters" -}}
{{- $parameters := dict }}
{{- range $parameter, $key := .names }}
{{- if include "shared-storage.setKeys" (dict "section" $.section "prefix" "" "keys" (list $key)) }}{{ $_ := set $parameters $parameter (include "shared-storage.parameterText" (index $.section $key)) }}{{ end }}
{{- end }}
{{- toJson $parameters }}
{{- end }}

{{/*
Return a value as text, which drivers require for all parameters. Input: anything. Output: true, 16, a,b or k=v,k=v.
  {{ include "shared-storage.parameterText" (list "a" "b") }}
*/}}
{{- define "shared-storage.parameterText" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if kindIs "map" . }}{{ $pairs := list }}{{ range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $key (include "shared-storage.parameterText" $value)) }}{{ end }}{{ join "," $pairs }}
{{- else if kindIs "string" . }}{{ . }}
{{- else }}{{ toJson . }}
{{- end }}
{{- end }}
