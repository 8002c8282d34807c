{{/*
What the API server would refuse of a pod, found before a release is made of it: an upgrade that fails later than this has
a revision, and `--atomic` rolls that back. Input: the dict of tokenmill.podSpec, with "resources" and "claims" as the pod
gets them. Output: nothing, or fails.
  {{ include "tokenmill.validatePod" (merge (dict "resources" $resources "claims" $claims) .) }}
*/}}
{{- define "tokenmill.validatePod" -}}
{{- include "tokenmill.validateResources" (dict "container" (.container | default .stage) "of" .resources) -}}
{{- range .root.Values.extraEnv }}
{{- if and .value .valueFrom }}
{{- fail (printf "\nextraEnv: %s has both value and valueFrom.\nLeave one of them out." .name) }}
{{- end }}
{{- include "tokenmill.validateVariable" (dict "key" "extraEnv" "name" .name "value" (.value | default "")) }}
{{- end }}
{{- $names := list "scratch" -}}{{- $places := list "/scratch" -}}
{{- range .claims }}{{ $names = append $names .name }}{{ $places = append $places .mountPath }}{{ end -}}
{{- range .volumes | default "" | fromYamlArray }}{{ $names = append $names .name }}{{ end -}}
{{- range .mounts | default "" | fromYamlArray }}{{ $places = append $places .mountPath }}{{ end -}}
{{- if .root.Values.environment.caBundle.configMap }}{{ $names = append $names "ca" }}{{ $places = append $places "/etc/tokenmill" }}{{ end -}}
{{- range .root.Values.extraVolumes }}
{{- if has .name $names }}{{ fail (printf "\nextraVolumes: there are two volumes with the name %q.\nGive this one another name." .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- range .root.Values.extraVolumeMounts }}
{{- if not (has .name $names) }}{{ fail (printf "\nextraVolumeMounts: no volume has the name %q; there are: %s.\nAdd it to extraVolumes, or name one of these." .name (join ", " $names)) }}{{ end }}
{{- if has .mountPath $places }}{{ fail (printf "\nextraVolumeMounts: two volumes are mounted at %s.\nChoose another mountPath for %s." .mountPath .name) }}{{ end }}
{{- $places = append $places .mountPath }}
{{- end }}
{{- end }}

{{/*
Requests are within limits, and equal to them for what cannot be overcommitted: devices and huge pages.
Input: dict "container" a name, "of" resources. Output: nothing, or fails.
  {{ include "tokenmill.validateResources" (dict "container" "extract" "of" .Values.resources) }}
*/}}
{{- define "tokenmill.validateResources" -}}
{{- $limits := .of.limits | default dict -}}
{{- range $name, $request := .of.requests }}
{{- if hasKey $limits $name }}
{{- $asked := include "tokenmill.quantity" $request | float64 }}
{{- $limit := include "tokenmill.quantity" (get $limits $name) | float64 }}
{{- if gt $asked $limit }}
{{- fail (printf "\nthe container %s requests %s=%v, above its limit %v.\nLower resources.requests.%s, or raise resources.limits.%s." $.container $name $request (get $limits $name) $name $name) }}
{{- end }}
{{- if and (ne $asked $limit) (or (contains "/" $name) (hasPrefix "hugepages-" $name)) }}
{{- fail (printf "\nthe container %s requests %s=%v and has the limit %v: devices and huge pages cannot be overcommitted.\nSet both to the same amount, or the limit alone." $.container $name $request (get $limits $name)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
A variable whose name or value looks like a secret's has no value in the clear: whoever may read the release, the Job or
the pods would see it. Switches, numbers, paths and references are none. The message does not repeat the value.
Input: dict "key" of the values, "name", "value" a string. Output: nothing, or fails.
  {{ include "tokenmill.validateVariable" (dict "key" "extraEnv" "name" "HF_TOKEN" "value" "x") }}
*/}}
{{- define "tokenmill.validateVariable" -}}
{{- $password := "(?i)(PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(^|_)PWD)" -}}
{{- $secret := "(?i)((TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY)S?(_[A-Z0-9_]+)?|(^|_)(KEY|PWD|PAT|SAS)|(ACCOUNT|PRIVATE|SIGNING|ENCRYPTION|AUTH)_?KEY)$" -}}
{{- $other := "(?i)(_(FILE|FILES|PATH|DIR|NAME|URL|URI|ENDPOINT|TTL|TIMEOUT|LIMIT|TYPE|PROVIDER)|PUBLIC_?KEY)$" -}}
{{- $plain := "(?i)^(true|false|yes|no|on|off|none|null|/[^\\s]*|\\$\\([a-z0-9_]+\\))$" -}}
{{- $known := "^(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{10,}|^eyJ[A-Za-z0-9_-]{10,}\\.|-----BEGIN [A-Z ]*PRIVATE KEY|(?i)AccountKey=|SharedAccessSignature|[?&](sig|token)=|^[a-z0-9+.-]+://[^/?#@\\s]*:[^/?#@\\s]+@" -}}
{{- $named := and (regexMatch $secret .name) (not (regexMatch $other .name)) (not (regexMatch $plain .value)) -}}
{{- if and $named (regexMatch "^[0-9.+-]{1,7}$" .value) (not (regexMatch $password .name)) }}{{ $named = false }}{{ end -}}
{{- if and .value (or $named (regexMatch $known .value)) }}
{{- $key := .name | lower | replace "_" "-" }}
{{- fail (printf "\n%s: the value of %s looks like a secret, and everybody who may read the release or its pods would see it.\nPut it into a Secret: kubectl create secret generic NAME --from-file=%s=/dev/stdin\nName that: extraEnv: [{name: %s, valueFrom: {secretKeyRef: {name: NAME, key: %s}}}]" .key .name $key .name $key) }}
{{- end }}
{{- end }}
