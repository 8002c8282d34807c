{{/*
The claim. Input: dict "root" $ "storageClassName" (nil for the cluster's default, "" for none) "volumeName" (may be
empty) "keep" (whether it stays when the release goes). Output: a document.
  {{ include "shared-storage.claim" (dict "root" . "storageClassName" "" "volumeName" "x" "keep" false) }}
*/}}
{{- define "shared-storage.claim" -}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .root.Values.pvc.name }}
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
  volumeName: {{ . }}
  {{- end }}
{{ end }}
