{{/*
Refuse a pod that the API server would refuse, before Helm creates a release. A later failure of an upgrade leaves a
revision behind, which `--atomic` rolls back. Input: the dict of tokenmill.podSpec, with the final "resources", "claims" and
"priorityClassName" of the pod. Output: nothing, or fails.
  {{ include "tokenmill.validatePod" (merge (dict "resources" $resources "claims" $claims) .) }}
*/}}
{{- define "tokenmill.validatePod" -}}
{{- include "tokenmill.validateNotify" .root -}}
{{- include "tokenmill.validatePriorityClass" . -}}
{{- include "tokenmill.validateResources" (dict "container" (.container | default .stage) "resources" .resources) -}}
{{- range .root.Values.extraEnv }}
{{- if and .value .valueFrom }}
{{- fail (printf "\nextraEnv: the variable %s has both value and valueFrom.\nRemove one of them." .name) }}
{{- end }}
{{- include "tokenmill.validateVariable" (dict "key" "extraEnv" "name" .name "value" (.value | default "")) }}
{{- end }}
{{- $names := list "scratch" -}}{{- $mountPaths := list "/scratch" -}}
{{- range .claims }}{{ $names = append $names .name }}{{ $mountPaths = append $mountPaths .mountPath }}{{ end -}}
{{- range .volumes | default "" | fromYamlArray }}{{ $names = append $names .name }}{{ end -}}
{{- range .mounts | default "" | fromYamlArray }}{{ $mountPaths = append $mountPaths .mountPath }}{{ end -}}
{{- if .root.Values.environment.caBundle.configMap }}{{ $names = append $names "ca" }}{{ $mountPaths = append $mountPaths "/etc/tokenmill" }}{{ end -}}
{{- range .root.Values.extraVolumes }}
{{- if has .name $names }}{{ fail (printf "\nextraVolumes: the name %q is already the name of another volume.\nChoose another name." .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- range .root.Values.extraVolumeMounts }}
{{- if not (has .name $names) }}{{ fail (printf "\nextraVolumeMounts: there is no volume %q; the volumes are: %s.\nAdd the volume to extraVolumes, or use one of these names." .name (join ", " $names)) }}{{ end }}
{{- if has .mountPath $mountPaths }}{{ fail (printf "\nextraVolumeMounts: another volume is already mounted at %s.\nChoose another mountPath for %s." .mountPath .name) }}{{ end }}
{{- $mountPaths = append $mountPaths .mountPath }}
{{- end }}
{{- end }}

{{/*
Check that the pod's priority class exists, if this render can read the cluster and `checkCluster` is true: the API server
accepts a Job with an unknown class, and then refuses its pods. A cluster always has the classes system-*. Input: dict "root"
$, "priorityClassName" (may be empty). Output: nothing, or fails.
  {{ include "tokenmill.validatePriorityClass" (dict "root" . "priorityClassName" "high") }}
*/}}
{{- define "tokenmill.validatePriorityClass" -}}
{{- $name := .priorityClassName | default "" -}}
{{- if and $name (not (hasPrefix "system-" $name)) (ne (toJson .root.Values.checkCluster) "false") (eq (include "tokenmill.connected" .root) "true") -}}
{{- if not (lookup "scheduling.k8s.io/v1" "PriorityClass" "" $name) }}
{{- fail (printf "\npriorityClassName: there is no PriorityClass %q, and the API server would refuse each pod.\nCreate it, or name another one: kubectl get priorityclasses" $name) }}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Check that requests are within limits, and equal to them for devices and huge pages, which cannot be overcommitted.
Input: dict "container" a name, "resources" as in Kubernetes. Output: nothing, or fails.
  {{ include "tokenmill.validateResources" (dict "container" "extract" "resources" .Values.resources) }}
*/}}
{{- define "tokenmill.validateResources" -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $request := .resources.requests }}
{{- if hasKey $limits $name }}
{{- $requested := include "tokenmill.quantity" $request | float64 }}
{{- $limit := include "tokenmill.quantity" (get $limits $name) | float64 }}
{{- if gt $requested $limit }}
{{- fail (printf "\nthe container %s requests %s=%v, above its limit %v.\nLower resources.requests.%s, or raise resources.limits.%s." $.container $name $request (get $limits $name) $name $name) }}
{{- end }}
{{- if and (ne $requested $limit) (or (contains "/" $name) (hasPrefix "hugepages-" $name)) }}
{{- fail (printf "\nthe container %s requests %s=%v with the limit %v: devices and huge pages cannot be overcommitted.\nSet both to the same amount, or set only the limit." $.container $name $request (get $limits $name)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Refuse a plain value of a variable whose name or value looks like that of a secret: every user with read access to the
release, the Job or the pods could read it. Switches, numbers, paths and references are accepted. The message does not
repeat the value.
Input: dict "key" of the values, "name", "value" a string. Output: nothing, or fails.
  {{ include "tokenmill.validateVariable" (dict "key" "extraEnv" "name" "HF_TOKEN" "value" "x") }}
*/}}
{{- define "tokenmill.validateVariable" -}}
{{- $passwordName := "(?i)(PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|(^|_)PWD)" -}}
{{- $secretName := "(?i)((TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY)S?(_[A-Z0-9_]+)?|(^|_)(KEY|PWD|PAT|SAS)|(ACCOUNT|PRIVATE|SIGNING|ENCRYPTION|AUTH)_?KEY)$" -}}
{{- $harmlessName := "(?i)(_(FILE|FILES|PATH|DIR|NAME|URL|URI|ENDPOINT|TTL|TIMEOUT|LIMIT|TYPE|PROVIDER)|PUBLIC_?KEY)$" -}}
{{- $harmlessValue := "(?i)^(true|false|yes|no|on|off|none|null|/[^\\s]*|\\$\\([a-z0-9_]+\\))$" -}}
{{- $secretValue := "^(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{10,}|^eyJ[A-Za-z0-9_-]{10,}\\.|-----BEGIN [A-Z ]*PRIVATE KEY|(?i)AccountKey=|SharedAccessSignature|[?&](sig|token)=|^[a-z0-9+.-]+://[^/?#@\\s]*:[^/?#@\\s]+@" -}}
{{- $suspicious := and (regexMatch $secretName .name) (not (regexMatch $harmlessName .name)) (not (regexMatch $harmlessValue .value)) -}}
{{- if and $suspicious (regexMatch "^[0-9.+-]{1,7}$" .value) (not (regexMatch $passwordName .name)) }}{{ $suspicious = false }}{{ end -}}
{{- if and .value (or $suspicious (regexMatch $secretValue .value)) }}
{{- $key := .name | lower | replace "_" "-" }}
{{- fail (printf "\n%s: the value of %s looks like a secret: every user with read access to the release or its pods could read it.\nCreate a Secret: kubectl create secret generic NAME --from-file=%s=/dev/stdin\nUse the Secret: extraEnv: [{name: %s, valueFrom: {secretKeyRef: {name: NAME, key: %s}}}]" .key .name $key .name $key) }}
{{- end }}
{{- end }}
