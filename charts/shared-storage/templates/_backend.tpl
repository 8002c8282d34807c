{{/*
A back end NAME is the section NAME of values and a file _NAME.tpl, which defines, each of $:
  shared-storage.NAME.volume    its documents
  shared-storage.NAME.rules     nothing, or fails
  shared-storage.NAME.warnings  lines for NOTES that begin with Mind, or none
  shared-storage.NAME.about     JSON, of which each may be left out, and which the section may be null for:
    driver          what makes its volumes, where it has a StorageClass of its own, which storage.parameters are for
    sizeKey         the key that says its size in place of pvc.size
    source          what a volume for what is there is made of, in words; without it the claim outlives the release
    noMountOptions  why it does not read storage.mountOptions
    fit             what `tokenmill fit --storage` calls it; without it speedOf decides, "its server" unless it says so
Nothing else knows a back end's name. backends.json lists them: `make charts` makes it of these files.
*/}}

{{/*
What the back end says of itself. Input: $. Output: JSON.
  {{ $about := include "shared-storage.about" . | fromJson }}
*/}}
{{- define "shared-storage.about" -}}
{{ include (printf "shared-storage.%s.about" .Values.backend) . }}
{{- end }}

{{/*
Whether the claim outlives the release, and what a static volume is made of. Input: $. Output: true or nothing; words.
  {{ if include "shared-storage.stays" . }}...{{ else }}{{ include "shared-storage.source" . }}{{ end }}
*/}}
{{- define "shared-storage.stays" -}}
{{- if not (include "shared-storage.source" .) }}true{{ end }}
{{- end }}
{{- define "shared-storage.source" -}}
{{- (include "shared-storage.about" . | fromJson).source | default "" }}
{{- end }}
