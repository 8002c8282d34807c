{{/*
The claim. Input: dict "root" $ "size" a quantity, "storageClassName" (nil for the cluster's default, "" for none)
"volumeName" (may be empty) "keep" (whether it stays when the release goes) "grows" (whether its volume can), and for a
new volume "provisioner" and "parameters", which the claim records: its StorageClass does not stay. Output: a document.
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
What of a claim that is there cannot become what the values say. Input: as for the claim. Output: nothing, or fails.
  {{ include "shared-storage.validateClaim" . }}
*/}}
{{- define "shared-storage.validateClaim" -}}
{{- $name := .root.Values.pvc.name }}
{{- $namespace := .root.Release.Namespace }}
{{- with lookup "v1" "PersistentVolumeClaim" $namespace $name }}
{{- if .metadata.deletionTimestamp }}
{{- fail (printf "\nthe claim %q is still being deleted: a pod may use it (kubectl describe pvc %s -n %s).\nWait for it: kubectl wait --for=delete pvc/%s -n %s --timeout=5m" $name $name $namespace $name $namespace) }}
{{- end }}
{{- if ne $.root.Release.Name (index (.metadata.annotations | default dict) "meta.helm.sh/release-name" | default "") }}
{{- fail (printf "\nthere is a claim %q in namespace %s that is not of this release.\nUse it as it is, with storage.pvcName=%s in the other charts, or make another: --set pvc.name=NAME." $name $namespace $name) }}
{{- end }}
{{- if $.provisioner }}{{ include "shared-storage.validateMaker" (dict "claim" . "with" $) }}{{ end }}
{{- with .spec }}
{{- if and (kindIs "invalid" $.storageClassName) (has (toJson .storageClassName) (list "\"\"" (include "shared-storage.className" $.root | toJson))) }}
{{- fail (printf "\nThe claim %q was not made with backend=%s, and cannot be changed.\nGive the values it was made with (helm get values %s -n %s), -f values/storage/NAME.yaml among them, or set pvc.name to make another." $name $.root.Values.backend $.root.Release.Name $namespace) }}
{{- end }}
{{- range $key, $pair := dict
      "pvc.accessModes" (list .accessModes $.root.Values.pvc.accessModes)
      "storageClassName" (list .storageClassName (ternary .storageClassName $.storageClassName (kindIs "invalid" $.storageClassName)))
      "volumeName" (list .volumeName ($.volumeName | default .volumeName)) }}
{{- if ne (toJson (first $pair)) (toJson (last $pair)) }}
{{- fail (printf "\nThe claim %q is there with %s=%s, which cannot be changed to %s.\nKeep the values it was made with, or set pvc.name to make another." $name $key (toJson (first $pair)) (toJson (last $pair))) }}
{{- end }}
{{- end }}
{{- $asked := include "tokenmill.quantity" .resources.requests.storage | float64 }}
{{- $wanted := include "tokenmill.quantity" $.size | float64 }}
{{- if or (lt $wanted $asked) (and (gt $wanted $asked) (not $.grows)) }}
{{- fail (printf "\nThe claim %q is there with %s, and %s.\nKeep the size it was made with, or set pvc.name to make another." $name .resources.requests.storage (ternary (printf "a claim does not shrink to %s" $.size) (printf "this one cannot grow to %s" $.size) (lt $wanted $asked))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
A claim outlives its release and keeps its volume: another back end, or other parameters, under the same names would
describe what is not there. Which driver made it, its volume says, else Kubernetes' annotation, else the chart's own.
Input: dict "claim" as the cluster has it, "with" what shared-storage.claim is given. Output: nothing, or fails.
  {{ include "shared-storage.validateMaker" (dict "claim" $claim "with" .) }}
*/}}
{{- define "shared-storage.validateMaker" -}}
{{- $claim := .claim -}}{{- $asked := .with -}}
{{- $annotations := $claim.metadata.annotations | default dict -}}
{{- $driver := "" -}}
{{- with $claim.spec.volumeName }}{{ $driver = (((lookup "v1" "PersistentVolume" "" .).spec).csi).driver }}{{ end -}}
{{- range list "volume.kubernetes.io/storage-provisioner" "volume.beta.kubernetes.io/storage-provisioner" "tokenmill/provisioner" }}
{{- $driver = $driver | default (get $annotations .) }}
{{- end }}
{{- if and $driver (ne $driver $asked.provisioner) }}
{{- fail (include "shared-storage.otherDriver" (dict "what" (printf "The claim %q" $claim.metadata.name) "has" $driver "asked" $asked.provisioner "root" $asked.root)) }}
{{- end }}
{{- with get $annotations "tokenmill/parameters" }}
{{- $there := fromJson . }}
{{- range $key := concat (keys $there) (keys $asked.parameters) | uniq | sortAlpha }}
{{- if ne (toJson (get $there $key)) (toJson (get $asked.parameters $key)) }}
{{- fail (printf "\nThe claim %q is there with a volume of %s=%q, which cannot be changed to %q.\nKeep the values it was made with, or set pvc.name to make another." $claim.metadata.name $key (get $there $key) (get $asked.parameters $key)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
What to say where another driver made what is there. Input: dict "what", "has" and "asked" drivers, "root" $. Output: text.
  {{ fail (include "shared-storage.otherDriver" (dict "what" "The claim \"x\"" "has" "blob.csi.azure.com" "asked" "fsx.csi.aws.com" "root" .)) }}
*/}}
{{- define "shared-storage.otherDriver" -}}
{{- $backends := dict -}}
{{- range $name := .root.Files.Get "backends.json" | fromJsonArray }}
{{- with (include (printf "shared-storage.%s.about" $name) $.root | fromJson).driver }}{{ $_ := set $backends . $name }}{{ end }}
{{- end -}}
{{ printf "\n%s is of the driver %s (%s), and backend=%s is %s: neither can be changed." .what .has (get $backends .has | default "another back end" ) .root.Values.backend .asked }}
Keep the back end it was made with, or make another claim beside it: helm install OTHER charts/shared-storage --set pvc.name=OTHER, and these values.
{{- end }}
