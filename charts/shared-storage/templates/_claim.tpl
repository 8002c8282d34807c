{{/*
Return the claim. Input: dict "root" $ "size" a quantity, "storageClassName" (nil for the cluster's default, "" for none)
"volumeName" (may be empty) "keep" (whether it outlives the release) "grows" (whether its volume can grow), and for a new
volume "provisioner" and "parameters". The claim records these two, because its StorageClass is deleted with the release.
Output: a document.
  {{ include "shared-storage.claim" (dict "root" . "size" "1Ti" "storageClassName" "" "volumeName" "x" "keep" false "grows" false) }}
*/}}
{{- define "shared-storage.claim" -}}
{{- include "shared-storage.validateClaim" . -}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .root.Values.pvc.name | quote }}
  labels: {{- include "tokenmill.labels" .root | nindent 4 }}
  {{- if .keep }}
  annotations:
    helm.sh/resource-policy: keep
    {{- with .provisioner }}
    tokenmill/provisioner: {{ . }}
    tokenmill/parameters: {{ $.parameters | toJson | quote }}
    {{- end }}
  {{- end }}
spec:
  accessModes: {{- toYaml .root.Values.pvc.accessModes | nindent 4 }}
  resources: {requests: {storage: {{ .size | quote }}}}
  {{- if not (kindIs "invalid" .storageClassName) }}
  storageClassName: {{ .storageClassName | quote }}
  {{- end }}
  {{- with .volumeName }}
  volumeName: {{ . | quote }}
  {{- end }}
{{ end }}

{{/*
Refuse values that would need an immutable field of an existing claim to change. Input: as for the claim. Output: nothing,
or fails.
  {{ include "shared-storage.validateClaim" . }}
*/}}
{{- define "shared-storage.validateClaim" -}}
{{- $name := .root.Values.pvc.name }}
{{- $namespace := .root.Release.Namespace }}
{{- with lookup "v1" "PersistentVolumeClaim" $namespace $name }}
{{- if .metadata.deletionTimestamp }}
{{- fail (printf "\nthe PVC %q is still being deleted: a pod may use it (kubectl describe pvc %s -n %s).\nWait for its end: kubectl wait --for=delete pvc/%s -n %s --timeout=5m" $name $name $namespace $name $namespace) }}
{{- end }}
{{- if ne $.root.Release.Name (index (.metadata.annotations | default dict) "meta.helm.sh/release-name" | default "") }}
{{- fail (printf "\nthe PVC %q exists in namespace %s and does not belong to this release.\nUse it with storage.pvcName=%s in the other charts, or create another PVC: --set pvc.name=NAME." $name $namespace $name) }}
{{- end }}
{{- if $.provisioner }}{{ include "shared-storage.validateProvisioner" (dict "claim" . "requested" $) }}{{ end }}
{{- with .spec }}
{{- if and (kindIs "invalid" $.storageClassName) (has (toJson .storageClassName) (list "\"\"" (include "shared-storage.className" $.root | toJson))) }}
{{- fail (printf "\nthe PVC %q was not created with backend=%s, and cannot be changed.\nUse the values it was created with (helm get values %s -n %s), including -f values/storage/NAME.yaml, or set pvc.name to create another PVC." $name $.root.Values.backend $.root.Release.Name $namespace) }}
{{- end }}
{{- range $key, $pair := dict
      "pvc.accessModes" (list .accessModes $.root.Values.pvc.accessModes)
      "storageClassName" (list .storageClassName (ternary .storageClassName $.storageClassName (kindIs "invalid" $.storageClassName)))
      "volumeName" (list .volumeName ($.volumeName | default .volumeName)) }}
{{- if ne (toJson (first $pair)) (toJson (last $pair)) }}
{{- fail (printf "\nthe PVC %q exists with %s=%s, which cannot be changed to %s.\nUse the values it was created with, or set pvc.name to create another PVC." $name $key (toJson (first $pair)) (toJson (last $pair))) }}
{{- end }}
{{- end }}
{{- $existingSize := include "tokenmill.quantity" .resources.requests.storage | float64 }}
{{- $newSize := include "tokenmill.quantity" $.size | float64 }}
{{- if or (lt $newSize $existingSize) (and (gt $newSize $existingSize) (not $.grows)) }}
{{- fail (printf "\nthe PVC %q exists with a size of %s, and %s.\nUse the size it was created with, or set pvc.name to create another PVC." $name .resources.requests.storage (ternary (printf "a PVC cannot shrink to %s" $.size) (printf "this one cannot grow to %s" $.size) (lt $newSize $existingSize))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Refuse another driver or other parameters for an existing claim: a claim outlives its release and keeps its volume, so that
the new values would not describe it. The driver is in the volume, else in Kubernetes' annotation, else in the chart's.
Input: dict "claim" of the cluster, "requested": the input of shared-storage.claim. Output: nothing, or fails.
  {{ include "shared-storage.validateProvisioner" (dict "claim" $claim "requested" .) }}
*/}}
{{- define "shared-storage.validateProvisioner" -}}
{{- $claim := .claim -}}{{- $requested := .requested -}}
{{- $annotations := $claim.metadata.annotations | default dict -}}
{{- $driver := "" -}}
{{- with $claim.spec.volumeName }}{{ $driver = (((lookup "v1" "PersistentVolume" "" .).spec).csi).driver }}{{ end -}}
{{- range list "volume.kubernetes.io/storage-provisioner" "volume.beta.kubernetes.io/storage-provisioner" "tokenmill/provisioner" }}
{{- $driver = $driver | default (get $annotations .) }}
{{- end }}
{{- if and $driver (ne $driver $requested.provisioner) }}
{{- fail (include "shared-storage.driverMismatch" (dict "object" (printf "the PVC %q" $claim.metadata.name) "existing" $driver "requested" $requested.provisioner "root" $requested.root)) }}
{{- end }}
{{- with get $annotations "tokenmill/parameters" }}
{{- $existingParameters := fromJson . }}
{{- range $key := concat (keys $existingParameters) (keys $requested.parameters) | uniq | sortAlpha }}
{{- if ne (toJson (get $existingParameters $key)) (toJson (get $requested.parameters $key)) }}
{{- fail (printf "\nthe PVC %q exists with a volume of %s=%q, which cannot be changed to %q.\nUse the values it was created with, or set pvc.name to create another PVC." $claim.metadata.name $key (get $existingParameters $key) (get $requested.parameters $key)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return the message for an object of another driver. Input: dict "object", "existing" and "requested" drivers, "root" $.
Output: text.
  {{ fail (include "shared-storage.driverMismatch" (dict "object" "The PVC \"x\"" "existing" "blob.csi.azure.com" "requested" "fsx.csi.aws.com" "root" .)) }}
*/}}
{{- define "shared-storage.driverMismatch" -}}
{{- $backends := dict -}}
{{- range $name := .root.Files.Get "backends.json" | fromJsonArray }}
{{- with (include (printf "shared-storage.%s.properties" $name) $.root | fromJson).driver }}{{ $_ := set $backends . $name }}{{ end }}
{{- end -}}
{{ printf "\n%s has the driver %s (%s), but backend=%s has %s: the driver of a volume cannot be changed." .object .existing (get $backends .existing | default "another back end" ) .root.Values.backend .requested }}
Use the back end it was created with, or create a second PVC: helm install OTHER charts/shared-storage --set pvc.name=OTHER, with these values.
{{- end }}
