{{/*
A directory of one node, for a cluster of one node or for tests.
Input: $. Output: documents.
  {{ include "shared-storage.local.volume" . }}
*/}}
{{- define "shared-storage.local.volume" -}}
{{- $node := dict "key" "metadata.name" "operator" "In" "values" (list .Values.local.nodeName) -}}
{{- $affinity := dict "required" (dict "nodeSelectorTerms" (list (dict "matchFields" (list $node)))) -}}
{{ include "shared-storage.static" (dict "root" . "size" (.Values.pvc.size | default "100Gi" | toString) "mountOptions" list
      "spec" (dict "local" (dict "path" .Values.local.path) "nodeAffinity" $affinity)) }}
{{- end }}

{{/*
Its rules. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.local.rules" . }}
*/}}
{{- define "shared-storage.local.rules" -}}
{{- if or (not (hasPrefix "/" .Values.local.path)) (not .Values.local.nodeName) }}
{{- fail "\nbackend=local needs local.path, a directory that exists on the node, from its root, and local.nodeName, the node's name (kubectl get nodes).\nAdd --set local.path=/DIRECTORY --set local.nodeName=NODE." }}
{{- end }}
{{- if and (eq (include "tokenmill.connected" .) "true") (not (lookup "v1" "Node" "" .Values.local.nodeName)) }}
{{- fail (printf "\nlocal.nodeName: there is no node %q, and the pods would wait for it for ever.\nName another: kubectl get nodes" .Values.local.nodeName) }}
{{- end }}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.local.warnings" . }}
*/}}
{{- define "shared-storage.local.warnings" -}}
{{- /* None. */}}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.local.about" . | fromJson }}
*/}}
{{- define "shared-storage.local.about" -}}
{{ dict "source" (printf "the directory %s" (.Values.local | default dict).path) "speedOf" "the node's disk"
      "noMountOptions" "a directory of the node is not mounted" | toJson }}
{{- end }}
