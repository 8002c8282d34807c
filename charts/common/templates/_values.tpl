{{/*
Values over others, key by key: maps are merged, null is what was not said, and anything else replaces, false and 0 too,
which `merge` and `mergeOverwrite` take for what was not said. Input: list of the values above and those below.
Output: JSON.
  {{ $values := include "tokenmill.over" (list .Values.preprocess .Values) | fromJson }}
*/}}
{{- define "tokenmill.over" -}}
{{- $found := deepCopy (last .) -}}
{{- range $key, $value := first . -}}
{{- $below := get $found $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $below) -}}
{{- $_ := set $found $key (include "tokenmill.over" (list $value $below) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $found $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}
