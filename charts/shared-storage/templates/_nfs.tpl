{{/*
A directory that an NFS server exports, mounted by Kubernetes itself. Input: $. Output: documents.
  {{ include "shared-storage.nfs" . }}
*/}}
{{- define "shared-storage.nfs" -}}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "nfs" "keys" (list "server" "path") "remedy" "Add --set nfs.server=SERVER --set nfs.path=/DIRECTORY, as `showmount -e SERVER` lists them.") -}}
{{ include "shared-storage.static" (dict "root" . "size" (.Values.pvc.size | default "100Gi" | toString) "mountOptions" (include "shared-storage.nfs.options" . | fromJsonArray)
      "spec" (dict "nfs" (dict "server" .Values.nfs.server "path" .Values.nfs.path))) }}
{{- end }}

{{/*
Its mount options: wait for a server that is away rather than fail in the middle of a file, and ask again for a file that
was missing. Input: $. Output: a JSON list.
  {{ include "shared-storage.nfs.options" . | fromJsonArray }}
*/}}
{{- define "shared-storage.nfs.options" -}}
{{- $made := list "hard" "lookupcache=positive" }}
{{- with .Values.nfs.version }}{{ $made = append $made (printf "nfsvers=%s" (include "shared-storage.word" .)) }}{{ end }}
{{- with .Values.nfs.nconnect }}{{ $made = append $made (printf "nconnect=%d" (int64 .)) }}{{ end }}
{{- with .Values.storage.mountOptions }}
{{- with include "shared-storage.given" (dict "of" $.Values.nfs "prefix" "nfs." "keys" (list "version" "nconnect")) }}
{{- fail (printf "\nstorage.mountOptions stand in place of all that the chart makes, %s among them.\nLeave out the one or the others: --set nfs.version= --set nfs.nconnect=null." .) }}
{{- end }}
{{- end }}
{{- toJson (.Values.storage.mountOptions | default $made) }}
{{- end }}
