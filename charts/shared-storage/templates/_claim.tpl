{{/*
The claim. Input: dict "root" $ "size" a quantity, "storageClassName" (nil for the cluster's default, "" for none)
"volumeName" (may be empty) "keep" (whether it stays when the release goes) "grows" (whether its volume can). Output: a document.
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
{{- with .spec }}
{{- if and (kindIs "invalid" $.storageClassName) (has (toJson .storageClassName) (list "\"\"" (include "shared-storage.className" $.root | toJson))) }}
{{- fail (printf "\nThe claim %q was not made with backend=existing, and cannot be changed.\nGive the values it was made with (helm get values %s -n %s), -f values/storage/NAME.yaml among them, or set pvc.name to make another." $name $.root.Release.Name $namespace) }}
{{- end }}
{{- range $key, $pair := dict
      "pvc.accessModes" (list .accessModes $.root.Values.pvc.accessModes)
      "storageClassName" (list .storageClassName (ternary .storageClassName $.storageClassName (kindIs "invalid" $.storageClassName)))
      "volumeName" (list .volumeName ($.volumeName | default .volumeName)) }}
{{- if ne (toJson (first $pair)) (toJson (last $pair)) }}
{{- fail (printf "\nThe claim %q is there with %s=%s, which cannot be changed to %s.\nKeep the values it was made with, or set pvc.name to make another." $name $key (toJson (first $pair)) (toJson (last $pair))) }}
{{- end }}
{{- end }}
{{- $asked := include "shared-storage.bytes" .resources.requests.storage | float64 }}
{{- $wanted := include "shared-storage.bytes" $.size | float64 }}
{{- if or (lt $wanted $asked) (and (gt $wanted $asked) (not $.grows)) }}
{{- fail (printf "\nThe claim %q is there with %s, and %s.\nKeep the size it was made with, or set pvc.name to make another." $name .resources.requests.storage (ternary (printf "a claim does not shrink to %s" $.size) (printf "this one cannot grow to %s" $.size) (lt $wanted $asked))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
A quantity of Kubernetes as a number of bytes, whatever its unit. Input: 100Gi, 1.5T, 1000 and so on. Output: a number.
  {{ include "shared-storage.bytes" "100Gi" }}
*/}}
{{- define "shared-storage.bytes" -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) }}
{{- $bytes := trimSuffix $unit (toString .) | float64 }}
{{- range until (int (index (dict "" 0 "Ki" 1 "Mi" 2 "Gi" 3 "Ti" 4 "Pi" 5 "Ei" 6 "k" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) $unit)) }}
{{- $bytes = mulf $bytes (ternary 1024.0 1000.0 (hasSuffix "i" $unit)) }}
{{- end }}
{{- printf "%.0f" $bytes }}
{{- end }}
