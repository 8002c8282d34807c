{{/*
Merge two dicts of values, key by key: maps are merged, null keeps the lower value, and any other upper value replaces
the lower one. False and 0 replace it too; `merge` and `mergeOverwrite` would ignore them.
Input: list of the upper and the lower dict. Output: JSON.
  {{ $values := include "tokenmill.mergedValues" (list .Values.preprocess .Values) | fromJson }}
*/}}
{{- define "tokenmill.mergedValues" -}}
{{- $merged := deepCopy (last .) -}}
{{- range $key, $value := first . -}}
{{- $lower := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $lower) -}}
{{- $_ := set $merged $key (include "tokenmill.mergedValues" (list $value $lower) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $merged }}
{{- end }}
