{{/*
What in the mount options does harm, whoever wrote them. Input: $. Output: lines that begin with Mind, or none.
  {{ include "shared-storage.warnings" . }}
*/}}
{{- define "shared-storage.warnings" -}}
{{- $raw := .Values.storage.mountOptions -}}
{{- if and (eq .Values.backend "blob") (ne .Values.blob.protocol "nfs") }}
{{- include "shared-storage.blobfuseWarnings" (printf " %s " (include "shared-storage.blob.options" . | fromJsonArray | join " ")) }}
{{- else if and (eq .Values.backend "nfs") (has "soft" $raw) }}
Mind: with the mount option soft, a write fails when the server is slow, in the middle of a checkpoint. Take hard.
{{- else if and (has .Values.backend (list "amlfs" "fsx")) $raw (not (has "flock" $raw)) }}
Mind: without the mount option flock, locks of files fail, which libraries take when they load models and data sets. Add flock.
{{- end }}
{{- with include "shared-storage.otherOptions" . }}
{{ . }}
{{- end }}
{{- end }}

{{/*
BlobFuse's mount options. Each of its caches lasts 120 s unless an option says otherwise, and block cache takes
the place of file cache (cmd/mount.go and component/ of azure-storage-fuse). Input: the options as text, with a space at
each end. Output: lines, or none.
  {{ include "shared-storage.blobfuseWarnings" " -o allow_other --block-cache " }}
*/}}
{{- define "shared-storage.blobfuseWarnings" -}}
{{- $direct := regexMatch "[ ,]direct_io|--direct-io" . -}}
{{- $quiet := or $direct (contains "--disable-kernel-cache" .) -}}
{{- $block := contains " --block-cache " . -}}
{{- $off := dict "attr-cache-timeout" (or $direct (contains "--use-attr-cache=false" .)) "file-cache-timeout" (or $direct $block) -}}
{{- $old := list }}{{ $seconds := 0 -}}
{{- range list "attr_timeout" "entry_timeout" "negative_timeout" "attr-cache-timeout" "file-cache-timeout" }}
{{- $given := regexFind (printf "[-, ]%s(-in-seconds)?[= ][0-9]+" (regexReplaceAll "[-_]" . "[-_]")) $ }}
{{- $lasts := regexFind "[0-9]+$" $given | default "120" | int }}
{{- if and $lasts (not (ternary (get $off .) $quiet (hasKey $off .))) }}
{{- $old = append $old (ternary . (printf "%s, %d when it is not given" . $lasts) (not (empty $given))) }}{{ $seconds = max $seconds $lasts }}
{{- end }}
{{- end }}
{{- with $old }}
Mind: a node believes for up to {{ $seconds }} s what it knows of a file, that it is missing included ({{ join "; " . }}): stages find what other nodes wrote only then, and a training run that starts again may read an old checkpoint tracker. Set them to 0.
{{- end }}
{{- if $block }}
{{- with regexFindAll "--(file-cache-timeout[a-z-]*|cache-size-mb|tmp-path)" . -1 }}
Mind: {{ join ", " . }} {{ ternary "does" "do" (eq (len .) 1) }} nothing beside --block-cache, which takes the place of the file cache. Leave {{ ternary "it" "them" (eq (len .) 1) }} out, or leave out --block-cache.
{{- end }}
Mind: --block-cache keeps its blocks in the node's memory, outside the limits of pods: {{ regexFind "--block-cache-pool-size=[0-9]+" . | default "more than half of it, since --block-cache-pool-size is not given: set that in MB" }}. Checkpoints in torch's old format, which writes back and forth, have failed with it (azure-storage-fuse#1537).
{{- end }}
{{- if not (regexMatch "[ ,]allow_other|--allow-other" .) }}
Mind: without -o allow_other only root reads the volume, and the pods are not root. Add it.
{{- end }}
{{- end }}

{{/*
A volume keeps the mount options it was made with. Only who made a StorageClass may look at it. Input: $. Output: a line, or
nothing.
  {{ include "shared-storage.otherOptions" . }}
*/}}
{{- define "shared-storage.otherOptions" -}}
{{- if and (has .Values.backend (list "amlfs" "blob" "fsx")) (include "shared-storage.stays" .) }}
{{- $options := (lookup "storage.k8s.io/v1" "StorageClass" "" (include "shared-storage.className" .)).mountOptions }}
{{- $volume := ((lookup "v1" "PersistentVolumeClaim" .Release.Namespace .Values.pvc.name).spec).volumeName }}
{{- $has := ((lookup "v1" "PersistentVolume" "" ($volume | default "-")).spec).mountOptions }}
{{- if and $volume (ne (toJson $has) (toJson $options)) }}
Mind: the volume {{ $volume }} keeps the mount options it was made with. To change them: kubectl patch pv {{ $volume }} --type=merge -p '{"spec":{"mountOptions":{{ toJson $options }}}}', then start its pods again.
{{- end }}
{{- end }}
{{- end }}
