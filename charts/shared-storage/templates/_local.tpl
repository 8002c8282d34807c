{{/*
A directory of one node, for a cluster of one node or for tests. The volume and its claim go with the release, since a
volume that outlived its claim would never be bound again; the directory and what is in it stay.
Input: $. Output: documents.
  {{ include "shared-storage.local" . }}
*/}}
{{- define "shared-storage.local" -}}
{{- if or (not (hasPrefix "/" .Values.local.path)) (not .Values.local.nodeName) }}
{{- fail "\nbackend=local needs local.path, a directory that exists on the node, from its root, and local.nodeName, the node's name (kubectl get nodes).\nAdd --set local.path=/DIRECTORY --set local.nodeName=NODE." }}
{{- end }}
{{- $volume := printf "%s-%s" .Release.Namespace .Values.pvc.name -}}
{{- $claim := lookup "v1" "PersistentVolumeClaim" .Release.Namespace .Values.pvc.name -}}
{{- if and $claim (ne ($claim.spec.volumeName | default "") $volume) }}
{{- fail (printf "\nthere is a claim %q in namespace %s that was made otherwise, and a claim cannot be changed.\nDelete it (kubectl delete pvc %s -n %s; look first whether it holds data), or choose another name: --set pvc.name=NAME." .Values.pvc.name .Release.Namespace .Values.pvc.name .Release.Namespace) }}
{{- end }}
{{- with (lookup "v1" "PersistentVolume" "" $volume).spec }}
{{- if or (ne .local.path $.Values.local.path) (not (contains (printf "[%q]" $.Values.local.nodeName) (toJson .nodeAffinity))) }}
{{- fail (printf "\nThe volume %q is there with another directory or node, which cannot be changed.\nKeep the values it was made with, or set pvc.name to make another." $volume) }}
{{- end }}
{{- end }}
---
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{ $volume | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
spec:
  capacity: {storage: {{ .Values.pvc.size | quote }}}
  accessModes: {{- toYaml .Values.pvc.accessModes | nindent 4 }}
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {namespace: {{ .Release.Namespace | quote }}, name: {{ .Values.pvc.name | quote }}}
  local: {path: {{ .Values.local.path | quote }}}
  nodeAffinity:
    required:
      nodeSelectorTerms:
        - matchFields: [{key: metadata.name, operator: In, values: [{{ .Values.local.nodeName | quote }}]}]
{{ include "shared-storage.claim" (dict "root" . "storageClassName" "" "volumeName" $volume "keep" false) }}
{{- end }}
