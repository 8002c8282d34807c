{{/*
A StorageClass of this release alone, and the claim on it, which stays when the release goes, and the data with it.
Input: dict "root" $ "size" "provisioner" "parameters" "mountOptions" "grows". Output: documents.
  {{ include "shared-storage.dynamic" (dict "root" . "size" "16Ti" "provisioner" "fsx.csi.aws.com" "parameters" dict "mountOptions" list "grows" true) }}
*/}}
{{- define "shared-storage.dynamic" -}}
{{- $name := include "shared-storage.className" .root -}}
{{- $more := .root.Values.storage.parameters | default dict -}}
{{- range $key, $value := .parameters }}
{{- range keys $more | sortAlpha }}
{{- if eq (lower .) (lower $key) }}
{{- fail (printf "\nstorage.parameters.%s stands against %s=%q, which the chart makes of the section %s.\nSet it there, and leave it out here." . $key $value $.root.Values.backend) }}
{{- end }}
{{- end }}
{{- end }}
{{- $parameters := merge (dict) $more .parameters -}}
{{- range $key, $value := $parameters }}{{ $_ := set $parameters $key (include "shared-storage.word" $value) }}{{ end -}}
{{- with lookup "storage.k8s.io/v1" "StorageClass" "" $name }}
{{- if ne .provisioner $.provisioner }}
{{- fail (include "shared-storage.otherDriver" (dict "what" (printf "The StorageClass %q" $name) "has" .provisioner "asked" $.provisioner "root" $.root)) }}
{{- end }}
{{- $there := .parameters | default dict }}
{{- range $key := concat (keys $there) (keys $parameters) | uniq | sortAlpha }}
{{- if ne (toJson (get $there $key)) (toJson (get $parameters $key)) }}
{{- fail (printf "\nThe StorageClass %q is there with %s=%q, which cannot be changed to %q, nor can the volume that came from it.\nKeep the values it was made with, or make another volume: helm install OTHER charts/shared-storage --set pvc.name=OTHER, and these values." $name $key (get $there $key) (get $parameters $key)) }}
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
A PersistentVolume for what is there, and the claim that it is for. Both go with the release, since a volume that outlived
its claim would never be bound again; what is on it stays.
Input: dict "root" $ "size" "spec" what it is made of, "mountOptions". Output: documents.
  {{ include "shared-storage.static" (dict "root" . "size" "1Ti" "spec" (dict "nfs" (dict "server" "s" "path" "/")) "mountOptions" list) }}
*/}}
{{- define "shared-storage.static" -}}
{{- $name := include "shared-storage.volumeName" .root -}}
{{- $claim := .root.Values.pvc.name -}}
{{- $namespace := .root.Release.Namespace -}}
{{- with lookup "v1" "PersistentVolumeClaim" $namespace $claim }}
{{- if ne (.spec.volumeName | default "") $name }}
{{- fail (printf "\nthere is a claim %q in namespace %s that was made otherwise, and a claim cannot be changed.\nDelete it (kubectl delete pvc %s -n %s; look first whether it holds data), or choose another name: --set pvc.name=NAME." $claim $namespace $claim $namespace) }}
{{- end }}
{{- end }}
{{- $volume := lookup "v1" "PersistentVolume" "" $name }}
{{- if ($volume.metadata).deletionTimestamp }}
{{- fail (printf "\nthe volume %q is still being deleted.\nWait for it: kubectl wait --for=delete pv/%s --timeout=5m" $name $name) }}
{{- end }}
{{- if eq ($volume.status).phase "Released" }}
{{- fail (printf "\nthe volume %q is still there for a claim that is gone, and would never be bound again.\nRemove it, which leaves what is on it: kubectl delete pv %s" $name $name) }}
{{- end }}
{{- $there := $volume.spec }}
{{- range $key, $part := ternary .spec dict (not (empty $there)) }}
{{- if ne (toJson (index $there $key)) (toJson $part) }}
{{- fail (printf "\nThe volume %q is there with %s=%s, which cannot be changed to %s.\nKeep the values it was made with, or set pvc.name to make another." $name $key (toJson (index $there $key)) (toJson $part)) }}
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
Names that no other release has, of a StorageClass and of a volume: a namespace has no dot, and so ends at the first one. Input: $. Output: a name.
  {{ include "shared-storage.className" . }}
*/}}
{{- define "shared-storage.className" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}
{{- define "shared-storage.volumeName" -}}
{{ .Release.Namespace }}.{{ .Values.pvc.name }}
{{- end }}

{{/*
Parameters of a driver that are set. Input: dict "of" a section, "names" dict of parameter to key. Output: JSON.
  {{ include "shared-storage.parameters" (dict "of" .Values.amlfs "names" (dict "sku-name" "skuName")) | fromJson }}
*/}}
{{- define "shared-storage.parameters" -}}
{{- $found := dict }}
{{- range $parameter, $key := .names }}
{{- if include "shared-storage.given" (dict "of" $.of "prefix" "" "keys" (list $key)) }}{{ $_ := set $found $parameter (include "shared-storage.word" (index $.of $key)) }}{{ end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/*
A value as a driver takes it, which is always text. Input: anything. Output: true, 16, a,b or k=v,k=v.
  {{ include "shared-storage.word" (list "a" "b") }}
*/}}
{{- define "shared-storage.word" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if kindIs "map" . }}{{ $pairs := list }}{{ range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $key (include "shared-storage.word" $value)) }}{{ end }}{{ join "," $pairs }}
{{- else if kindIs "string" . }}{{ . }}
{{- else }}{{ toJson . }}
{{- end }}
{{- end }}
