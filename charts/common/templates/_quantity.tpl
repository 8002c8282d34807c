{{/*
Convert a quantity of Kubernetes to a number. Input: 100Gi, 500m, 1.5T, 1e9, 1000 and so on. Output: a number.
  {{ include "tokenmill.quantity" "100Gi" }}
*/}}
{{- define "tokenmill.quantity" -}}
{{- $text := ternary . (toJson .) (kindIs "string" .) }}
{{- $unit := regexFind "([KMGTPE]i|[numkMGTPE])$" $text }}
{{- $number := trimSuffix $unit $text | float64 }}
{{- range until (int (get (dict "Ki" 1 "Mi" 2 "Gi" 3 "Ti" 4 "Pi" 5 "Ei" 6 "k" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) $unit | default 0)) }}
{{- $number = mulf $number (ternary 1024.0 1000.0 (hasSuffix "i" $unit)) }}
{{- end }}
{{- range until (int (get (dict "m" 1 "u" 2 "n" 3) $unit | default 0)) }}{{ $number = divf $number 1000.0 }}{{ end }}
{{- printf "%.9f" $number }}
{{- end }}

{{/*
Return the resources of a container, with a request for the ephemeral storage of its scratch volume.
Input: dict "root" $, "resources" as in Kubernetes. Output: JSON.
  {{ include "tokenmill.resources" (dict "root" . "resources" .Values.resources) | fromJson }}
*/}}
{{- define "tokenmill.resources" -}}
{{- $scratch := .root.Values.scratch -}}
{{- $limit := get (.resources.limits | default dict) "ephemeral-storage" -}}
{{- $disk := dict -}}
{{- if not (or $scratch.storageClassName $limit) -}}
{{- $disk = dict "ephemeral-storage" (ternary $scratch.sizeLimit $scratch.request (kindIs "invalid" $scratch.request)) -}}
{{- end -}}
{{- merge (dict "requests" (merge (dict) (.resources.requests | default dict) $disk)) .resources | toJson -}}
{{- end }}
