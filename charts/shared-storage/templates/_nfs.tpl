{{/*
Return the objects for a directory that an NFS server exports; Kubernetes itself mounts it. Input: $. Output: documents.
  {{ include "shared-storage.nfs.volume" . }}
*/}}
{{- define "shared-storage.nfs.volume" -}}
{{ include "shared-storage.static" (dict "root" . "size" (.Values.pvc.size | default "100Gi" | toString) "mountOptions" (include "shared-storage.nfs.options" . | fromJsonArray)
      "spec" (dict "nfs" (dict "server" .Values.nfs.server "path" .Values.nfs.path))) }}
{{- end }}

{{/*
Return its mount options: wait for an unreachable server instead of failing in the middle of a file, and do not cache that a
file is missing. Input: $. Output: a JSON list.
  {{ include "shared-storage.nfs.options" . | fromJsonArray }}
*/}}
{{- define "shared-storage.nfs.options" -}}
{{- $derived := list "hard" "lookupcache=positive" }}
{{- with .Values.nfs.version }}{{ $derived = append $derived (printf "nfsvers=%s" (include "shared-storage.parameterText" .)) }}{{ end }}
{{- with .Values.nfs.nconnect }}{{ $derived = append $derived (printf "nconnect=%d" (int64 .)) }}{{ end }}
{{- toJson (.Values.storage.mountOptions | default $derived) }}
{{- end }}

{{/*
Check the section of this back end. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.nfs.rules" . }}
*/}}
{{- define "shared-storage.nfs.rules" -}}
{{- include "shared-storage.validateRequired" (dict "root" . "section" "nfs" "keys" (list "server" "path") "remedy" "Add --set nfs.server=SERVER --set nfs.path=/DIRECTORY, as `showmount -e SERVER` lists them.") }}
{{- with .Values.storage.mountOptions }}
{{- with include "shared-storage.setKeys" (dict "section" $.Values.nfs "prefix" "nfs." "keys" (list "version" "nconnect")) }}
{{- fail (printf "\nstorage.mountOptions replaces all mount options of the chart, including %s.\nRemove storage.mountOptions, or the other keys: --set nfs.version= --set nfs.nconnect=null." .) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return its warnings. Input: $. Output: lines that begin with Warning, or nothing.
  {{ include "shared-storage.nfs.warnings" . }}
*/}}
{{- define "shared-storage.nfs.warnings" -}}
{{- if has "soft" .Values.storage.mountOptions }}
Warning: with the mount option soft, a write fails if the server is slow, for example in the middle of a checkpoint. Use hard.
{{- end }}
{{- end }}

{{/*
Return its properties (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.nfs.properties" . | fromJson }}
*/}}
{{- define "shared-storage.nfs.properties" -}}
{{- $nfs := .Values.nfs | default dict -}}
{{ dict "source" (printf "the directory %s:%s" $nfs.server $nfs.path) | toJson }}
{{- end }}
