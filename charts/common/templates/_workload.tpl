{{/*
What runs, of any kind, or what clears its place. Input: a dict of
  root, apiVersion, kind, name
  hash     of all that cannot change while it runs
  spec     YAML of its spec
  empty    YAML of the spec of an object of the same kind that runs nothing
  kept     true where nothing is ever to be cleared; untried: true where no other name can be tried first
  onRollback  clear, or keep: what a rollback does to what runs
  trialLength  how much of the name the other one begins with, where it is not 40
Output: documents: the object, and what tokenmill.clearingHooks asks for.

A run's spec cannot change (a Job's), or must not (a PyTorchJob's pods would be replaced one by one, by others): an
upgrade with other values must delete it first. Helm deletes a hook of the same kind and name before it creates the hook,
the empty object runs nothing and is deleted, and Helm creates the real one.
  {{ include "tokenmill.workload" (dict "root" . "apiVersion" "batch/v1" "kind" "Job" ...) }}
*/}}
{{- define "tokenmill.workload" -}}
{{- include "tokenmill.object" (merge (dict "hooks" "") .) }}
{{- $hooks := include "tokenmill.clearingHooks" . }}
{{- if and (contains "pre-upgrade" $hooks) (not .untried) }}
{{- /* Under another name first: what the API server refuses must not cost the one that runs. */}}
{{- $name := printf "%s-trial-%s" (.name | trunc (int (.trialLength | default 40))) .hash }}
{{- include "tokenmill.object" (merge (dict "hooks" "pre-upgrade" "weight" -1 "name" $name) .) }}
{{- end }}
{{- if $hooks }}{{ include "tokenmill.object" (merge (dict "hooks" $hooks) .) }}{{ end }}
{{- end }}

{{/*
One of those documents. Input: the same dict, and "hooks": empty for the object itself, else the hooks at which it is
cleared; "weight" of the hook where it is not 0. Output: a document.
  {{ include "tokenmill.object" (merge (dict "hooks" "pre-upgrade") .) }}
*/}}
{{- define "tokenmill.object" }}
---
apiVersion: {{ .apiVersion }}
kind: {{ .kind }}
metadata:
  name: {{ .name | quote }}
  labels:
    {{- include "tokenmill.labels" .root | nindent 4 }}
    {{- if and .root.Values.kueue.queueName (not .hooks) }}
    kueue.x-k8s.io/queue-name: {{ .root.Values.kueue.queueName | quote }}
    {{- end }}
  annotations:
    {{- if .hooks }}
    helm.sh/hook: {{ .hooks }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    helm.sh/hook-weight: {{ .weight | default 0 | quote }}
    {{- else }}
    tokenmill/spec: {{ .hash | quote }}
    {{- with .root.Values.job.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
spec:
  {{- ternary .empty .spec (not (empty .hooks)) | nindent 2 }}
{{- end }}

{{/*
The hooks at which an object must be cleared: an upgrade that finds it with another hash, or failed; and every rollback,
unless it is to keep what runs. Helm renders nothing at a rollback: it runs the hooks that the target revision was stored
with, and a hook deletes by name, whatever is there. None where nothing is connected, so that `helm template` gives the same
bytes anywhere. Input: the dict of tokenmill.workload. Output: hooks, comma-separated.
  {{ include "tokenmill.clearingHooks" . }}
*/}}
{{- define "tokenmill.clearingHooks" -}}
{{- $hooks := list -}}
{{- if and (not .kept) (eq (include "tokenmill.connected" .root) "true") -}}
{{- $found := include "tokenmill.found" . | fromYaml -}}
{{- if $found -}}
{{- $annotations := $found.metadata.annotations | default dict -}}
{{- $changed := ne (index $annotations "tokenmill/spec") .hash -}}
{{- $failed := false -}}
{{- range ($found.status).conditions }}{{ if and (eq .type "Failed") (eq .status "True") }}{{ $failed = true }}{{ end }}{{ end -}}
{{- if or $changed $failed }}{{ $hooks = append $hooks "pre-upgrade" }}{{ end -}}
{{- end -}}
{{- if ne .onRollback "keep" }}{{ $hooks = append $hooks "pre-rollback" }}{{ end -}}
{{- end -}}
{{- join "," $hooks -}}
{{- end }}

{{/*
An object as the cluster has it; nothing where there is none, where nothing is connected, or where the cluster does not
know the kind, which would abort the render. Input: dict "root" "apiVersion" "kind" "name". Output: YAML.
  {{ $found := include "tokenmill.found" . | fromYaml }}
*/}}
{{- define "tokenmill.found" -}}
{{- if or (eq .kind "Job") (.root.Capabilities.APIVersions.Has (printf "%s/%s" .apiVersion .kind)) -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- end }}

{{/*
Whether this render can see the cluster: every namespace has this ConfigMap. Input: $. Output: true or nothing.
  {{ if eq (include "tokenmill.connected" .) "true" }}
*/}}
{{- define "tokenmill.connected" -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" }}true{{ end -}}
{{- end }}
