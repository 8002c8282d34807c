{{/*
A back end NAME is the section NAME of values, and a file _NAME.tpl with these templates, each with input $:
  shared-storage.NAME.volume      its documents
  shared-storage.NAME.rules       nothing, or fails
  shared-storage.NAME.warnings    lines for NOTES that begin with Warning, or nothing
  shared-storage.NAME.properties  JSON of these optional keys; must accept that the section is null:
    driver          CSI driver that provisions its volumes with a StorageClass, to which storage.parameters apply
    sizeKey         key of the size that replaces pvc.size
    source          description of the existing storage of a static volume; without it the claim outlives the release
    noMountOptions  reason why it does not read storage.mountOptions
    fit             its argument for `tokenmill fit --storage`
    speedOf         without "fit": the component that limits its speed, by default "its server"
No other file contains a back end's name. `make charts` writes backends.json from these files.
*/}}

{{/*
Return the properties of the back end. Input: $. Output: JSON.
  {{ $properties := include "shared-storage.properties" . | fromJson }}
*/}}
{{- define "shared-storage.properties" -}}
{{ include (printf "shared-storage.%s.properties" .Values.backend) . }}
{{- end }}

{{/*
Return whether the claim outlives the release, and the existing storage of a static volume. Input: $. Output: true or
nothing; a description.
  {{ if include "shared-storage.claimIsKept" . }}...{{ else }}{{ include "shared-storage.existingSource" . }}{{ end }}
*/}}
{{- define "shared-storage.claimIsKept" -}}
{{- if not (include "shared-storage.existingSource" .) }}true{{ end }}
{{- end }}
{{- define "shared-storage.existingSource" -}}
{{- (include "shared-storage.properties" . | fromJson).source | default "" }}
{{- end }}
