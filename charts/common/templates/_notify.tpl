{{/*
Return whether the end of a stage or run is announced. Input: $. Output: true or nothing.
  {{ if include "tokenmill.notifies" . }}
*/}}
{{- define "tokenmill.notifies" -}}
{{- with .Values.notify }}{{ if or .url (.urlSecret).name .event }}true{{ end }}{{ end -}}
{{- end }}

{{/*
Return the environment variables that set where a pod announces its end, and as an Event of which object. The Secret is
optional, because a missing one must not keep a pod from its work. Input: a dict of
  root
  kind   API version and kind of the object, as batch/v1/Job
  name   its name, or empty if the pods have it as a label; label: that label
Output: a YAML list, or nothing.
  env: {{ include "tokenmill.notifyEnvironment" (dict "root" . "kind" "kubeflow.org/v1/PyTorchJob" "name" "run") | nindent 2 }}
*/}}
{{- define "tokenmill.notifyEnvironment" -}}
{{- if include "tokenmill.notifies" .root }}
{{- $notify := .root.Values.notify }}
{{- if .label }}
- {name: TOKENMILL_OBJECT_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .label }}']"}}}
{{- end }}
- {name: TOKENMILL_NOTIFY_OBJECT, value: {{ printf "%s/%s" .kind (.name | default "$(TOKENMILL_OBJECT_NAME)") | quote }}}
- {name: TOKENMILL_NAMESPACE, value: {{ .root.Release.Namespace | quote }}}
{{- if or $notify.url $notify.urlSecret.name }}
- {name: TOKENMILL_NOTIFY_TEMPLATE, value: {{ $notify.template }}}
{{- end }}
{{- if $notify.urlSecret.name }}
- name: TOKENMILL_NOTIFY_URL
  valueFrom: {secretKeyRef: {name: {{ $notify.urlSecret.name | quote }}, key: {{ $notify.urlSecret.key | quote }}, optional: true}}
{{- else if $notify.url }}
- {name: TOKENMILL_NOTIFY_URL, value: {{ $notify.url | quote }}}
{{- end }}
{{- if $notify.event }}
- {name: TOKENMILL_NOTIFY_API, value: {{ include "tokenmill.notifyPath" . }}}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return the directory in the pods with the token for Events. Input: anything. Output: a path.
  {{ include "tokenmill.notifyPath" . }}
*/}}
{{- define "tokenmill.notifyPath" -}}
/var/run/secrets/tokenmill
{{- end }}

{{/*
Return the mount of that directory, if `notify.event` is true. Input: $. Output: a YAML list, or nothing.
  volumeMounts: {{ include "tokenmill.notifyMounts" . | nindent 2 }}
*/}}
{{- define "tokenmill.notifyMounts" -}}
{{- if (.Values.notify).event }}
- {name: events, mountPath: {{ include "tokenmill.notifyPath" . }}, readOnly: true}
{{- end }}
{{- end }}

{{/*
Return its volume: a token that the kubelet renews, and the certificate of the API server. Input: $. Output: a YAML list, or
nothing.
  volumes: {{ include "tokenmill.notifyVolumes" . | nindent 2 }}
*/}}
{{- define "tokenmill.notifyVolumes" -}}
{{- if (.Values.notify).event }}
- name: events
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}

{{/*
Return the Role of the pods' account, and its binding, if `notify.event` and `notify.createRole` are true: the pods may
create Events in their namespace, and read the object that the Events are about. Input: dict "root", "group" and "resource"
of the API, "name" of the object. Output: documents, or nothing.
  {{ include "tokenmill.notifyRole" (dict "root" . "group" "batch" "resource" "jobs" "name" "x-extract") }}
*/}}
{{- define "tokenmill.notifyRole" -}}
{{- $root := .root }}
{{- if and $root.Values.notify.event $root.Values.notify.createRole }}
{{- $name := printf "%s-notify" $root.Release.Name }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" $root | nindent 4 }}
rules:
  - apiGroups: [""]
    resources: [events]
    verbs: [create]
  - apiGroups: [{{ .group | quote }}]
    resources: [{{ .resource }}]
    resourceNames: [{{ .name | quote }}]
    verbs: [get]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" $root | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name | quote }}}
subjects:
  - {kind: ServiceAccount, name: {{ include "tokenmill.serviceAccountName" $root | quote }}, namespace: {{ $root.Release.Namespace | quote }}}
{{- end }}
{{- end }}

{{/*
Return the egress rules for announcements: the port of the webhook, 443 for an address in a Secret, and the ports of an API
server. Policies cannot select the API server, which runs outside of the pod network. Input: $. Output: a YAML list, may be empty.
  {{ include "tokenmill.notifyEgress" . | fromYamlArray }}
*/}}
{{- define "tokenmill.notifyEgress" -}}
{{- $notify := .Values.notify -}}
{{- $rules := list -}}
{{- if include "tokenmill.notifies" . -}}
{{- $port := 443 -}}
{{- with $notify.url }}
{{- $host := (urlParse .).host -}}
{{- $port = ternary 443 80 (hasPrefix "https:" .) -}}
{{- if regexMatch ":[0-9]+$" $host }}{{ $port = regexFind "[0-9]+$" $host | int }}{{ end -}}
{{- end -}}
{{- if or $notify.url $notify.urlSecret.name }}{{ $rules = append $rules (dict "ports" (list (dict "protocol" "TCP" "port" $port))) }}{{ end -}}
{{- if $notify.event }}{{ $rules = append $rules (dict "ports" (list (dict "protocol" "TCP" "port" 443) (dict "protocol" "TCP" "port" 6443))) }}{{ end -}}
{{- end -}}
{{ toYaml $rules }}
{{- end }}

{{/*
Check the values of `notify`. The address of a webhook is often its only credential. Input: $. Output: nothing, or fails.
  {{ include "tokenmill.validateNotify" . }}
*/}}
{{- define "tokenmill.validateNotify" -}}
{{- with .Values.notify -}}
{{- if and .url .urlSecret.name }}
{{- fail "\nnotify.url and notify.urlSecret.name are both set, and only one of them can be the address of the webhook.\nRemove one of them." }}
{{- end }}
{{- $host := (urlParse .url).host | lower -}}
{{- $path := (urlParse .url).path -}}
{{- if or (regexMatch "(^|\\.)(slack\\.com|office\\.com|powerplatform\\.com|logic\\.azure\\.com|discord\\.com|googleapis\\.com)(:[0-9]+)?$" $host) (regexMatch "(?i)[?&](sig|signature|token|key|access_token)=" .url) (regexMatch "[A-Za-z0-9_-]{24,}" $path) }}
{{- fail "\nnotify.url contains the URL of a webhook that needs no other credential: a user who can read the release could send messages with it.\nCreate a Secret: kubectl create secret generic notify --from-file=url=/dev/stdin\nUse the Secret: --set notify.urlSecret.name=notify" }}
{{- end }}
{{- end -}}
{{- end }}
