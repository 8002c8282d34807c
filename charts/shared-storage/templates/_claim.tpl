{{/*
The claim. Input: dict "root" $ "storageClassName" (nil for the cluster's default, "" for none) "volumeName" (may be
empty) "keep" (whether it stays when the release goes). Output: a document.
  {{ include "shared-storage.claim" (dict "root" . "storageClassName" "" "volumeName" "x" "keep" false) }}
*/}}
{{- define "shared-storage.claim" -}}
{{- $name := .root.Values.pvc.name }}
{{- with (lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace $name).spec }}
{{- range $key, $pair := dict
      "pvc.accessModes" (list .accessModes $.root.Values.pvc.accessModes)
      "storageClassName" (list .storageClassName (ternary .storageClassName $.storageClassName (kindIs "invalid" $.storageClassName)))
      "volumeName" (list .volumeName ($.volumeName | default .volumeName)) }}
{{- if ne (toJson (first $pair)) (toJson (last $pair)) }}
{{- fail (printf "\nThe claim %q is there with %s=%s, which cannot be changed to %s.\nKeep the values it was made with, or set pvc.name to make another." $name $key (toJson (first $pair)) (toJson (last $pair))) }}
{{- end }}
{{- end }}
{{- end }}
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
  resources: {requests: {storage: {{ .root.Values.pvc.size | quote }}}}
  {{- if not (kindIs "invalid" .storageClassName) }}
  storageClassName: {{ .storageClassName | quote }}
  {{- end }}
  {{- with .volumeName }}
  volumeName: {{ . | quote }}
  {{- end }}
{{ end }}
