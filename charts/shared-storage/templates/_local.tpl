{{/*
Return the objects for a directory of one node, for a cluster of one node or for tests.
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
Check the section of this back end. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.local.rules" . }}
*/}}
{{- define "shared-storage.local.rules" -}}
{{- if or (not (hasPrefix "/" .Values.local.path)) (not .Values.local.nodeName) }}
{{- fail "\nbackend=local needs local.path, the absolute path of an existing directory on the node, and local.nodeName, the node's name (kubectl get nodes).\nAdd --set local.path=/DIRECTORY --set local.nodeName=NODE." }}
{{- end }}
{{- if and (eq (include "tokenmill.connected" .) "true") (not (lookup "v1" "Node" "" .Values.local.nodeName)) }}
{{- fail (printf "\nlocal.nodeName=%q: there is no such node, and the pods would wait for it forever.\nSet the name of a node: kubectl get nodes" .Values.local.nodeName) }}
{{- end }}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.local.warnings" . }}
*/}}
{{- define "shared-storage.local.warnings" -}}
{{- /* This back end has no warnings. */}}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.local.properties" . | fromJson }}
*/}}
{{- define "shared-storage.local.properties" -}}
{{ dict "source" (printf "the directory %s" (.Values.local | default dict).path) "speedOf" "the node's disk"
      "noMountOptions" "a directory of the node is not mounted" | toJson }}
{{- end }}
