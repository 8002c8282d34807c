{{/*
A directory that an NFS server exports, mounted by Kubernetes itself. Input: $. Output: documents.
  {{ include "shared-storage.nfs.volume" . }}
*/}}
{{- define "shared-storage.nfs.volume" -}}
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
{{- toJson (.Values.storage.mountOptions | default $made) }}
{{- end }}

{{/*
Its rules. Input: $. Output: nothing, or fails.
  {{ include "shared-storage.nfs.rules" . }}
*/}}
{{- define "shared-storage.nfs.rules" -}}
{{- include "shared-storage.validateNeeded" (dict "root" . "section" "nfs" "keys" (list "server" "path") "remedy" "Add --set nfs.server=SERVER --set nfs.path=/DIRECTORY, as `showmount -e SERVER` lists them.") }}
{{- with .Values.storage.mountOptions }}
{{- with include "shared-storage.given" (dict "of" $.Values.nfs "prefix" "nfs." "keys" (list "version" "nconnect")) }}
{{- fail (printf "\nstorage.mountOptions stand in place of all that the chart makes, %s among them.\nLeave out the one or the others: --set nfs.version= --set nfs.nconnect=null." .) }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Its warnings. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.nfs.warnings" . }}
*/}}
{{- define "shared-storage.nfs.warnings" -}}
{{- if has "soft" .Values.storage.mountOptions }}
Mind: with the mount option soft, a write fails when the server is slow, in the middle of a checkpoint. Take hard.
{{- end }}
{{- end }}

{{/*
What the rest of the chart asks of it (_backend.tpl). Input: $. Output: JSON.
  {{ include "shared-storage.nfs.about" . | fromJson }}
*/}}
{{- define "shared-storage.nfs.about" -}}
{{- $nfs := .Values.nfs | default dict -}}
{{ dict "source" (printf "the directory %s:%s" $nfs.server $nfs.path) | toJson }}
{{- end }}
