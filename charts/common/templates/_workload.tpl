{{/*
Return the object that runs pods, of any kind, and the hooks that delete it for an upgrade. Input: a dict of
  root, apiVersion, kind, name
  hash     of everything that cannot change while it runs
  spec     YAML of its spec
  empty    YAML of the spec of an object of the same kind that runs nothing
  annotations  YAML of more annotations of the object
  neverClear   true: never delete a running object; skipTrial: true if there can be no trial under another name
  onRollback   clear or keep: the effect of a rollback on the running object
  trialLength  number of characters of the name that the trial's name starts with; 40 by default
  pods       of another kind than Job: dict of name to the YAML of each pod template that its controller creates pods from
Output: documents: the object, its trials, and the hooks of tokenmill.clearingHooks.

A spec that runs is immutable (a Job), or must not change (the operator would replace a PyTorchJob's pods one by one). An
upgrade with other values must therefore delete the old object first. Helm deletes a hook of the same kind and name
before it creates the hook. The empty object runs nothing and is deleted. Then Helm creates the real object.
  {{ include "tokenmill.workload" (dict "root" . "apiVersion" "batch/v1" "kind" "Job" ...) }}
*/}}
{{- define "tokenmill.workload" -}}
{{- include "tokenmill.object" (merge (dict "hooks" "") .) }}
{{- $trial := printf "%s-trial-%s" (.name | trunc (int (.trialLength | default 40))) .hash -}}
{{- $hooks := include "tokenmill.trialHooks" . }}
{{- if and (contains "pre-upgrade" $hooks) (not .skipTrial) }}
{{- /* A trial under another name: if the API server refuses the new object, the running one must not be deleted. */}}
{{- include "tokenmill.object" (merge (dict "hooks" "pre-upgrade" "weight" -1 "name" $trial) .) }}
{{- end }}
{{- if $hooks }}
{{- /* The API server checks the pod templates of Jobs, and of no other kind that runs pods. These Jobs run none. */}}
{{- range $name, $pod := .pods }}
{{- include "tokenmill.object" (dict "root" $.root "apiVersion" "batch/v1" "kind" "Job" "hooks" $hooks "weight" -3
      "name" (printf "%s-%s" $trial $name)
      "empty" (printf "completions: 0\nparallelism: 0\ntemplate: %s" (nindent 2 $pod))) }}
{{- end }}
{{- end }}
{{- with include "tokenmill.clearingHooks" . }}{{ include "tokenmill.object" (merge (dict "hooks" .) $) }}{{ end }}
{{- end }}

{{/*
Return the hooks at which the trials are created, before Helm creates or deletes anything else: pre-install, and pre-upgrade
if the upgrade creates the object. The API server itself refuses a Job at an installation.
Input: the dict of tokenmill.workload. Output: hooks, comma-separated.
  {{ include "tokenmill.trialHooks" . }}
*/}}
{{- define "tokenmill.trialHooks" -}}
{{- $hooks := list -}}
{{- if eq (include "tokenmill.connected" .root) "true" -}}
{{- if and (ne .kind "Job") (not .root.Release.IsUpgrade) }}{{ $hooks = append $hooks "pre-install" }}{{ end -}}
{{- $state := include "tokenmill.state" . -}}
{{- if or (eq $state "outdated") (and (eq $state "absent") .root.Release.IsUpgrade) }}{{ $hooks = append $hooks "pre-upgrade" }}{{ end -}}
{{- end -}}
{{- join "," $hooks -}}
{{- end }}

{{/*
Return one of these documents. Input: the same dict; "hooks": empty for the object itself, else the hooks at which it is
deleted; "weight" of the hook, 0 by default. Output: a document.
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
    {{- if .hooks }}
    # No such queue exists: Kueue must not admit this object by a namespace's default queue, and so run its pods.
    kueue.x-k8s.io/queue-name: tokenmill-none
    {{- else }}
    {{- with include "tokenmill.queueLabels" .root }}{{ . | nindent 4 }}{{ end }}
    {{- end }}
  annotations:
    {{- if .hooks }}
    helm.sh/hook: {{ .hooks }}
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
    helm.sh/hook-weight: {{ .weight | default 0 | quote }}
    {{- else }}
    tokenmill/spec: {{ .hash | quote }}
    {{- with .root.Values.job.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with .annotations }}{{ . | nindent 4 }}{{ end }}
    {{- end }}
spec:
  {{- ternary .empty .spec (not (empty .hooks)) | nindent 2 }}
{{- end }}

{{/*
Return the hooks at which the object must be deleted: pre-upgrade if the cluster's object is outdated, and pre-rollback unless
a rollback keeps the running object. Helm renders nothing at a rollback: it runs the hooks that are stored with the target
revision, and a hook deletes any object of its name. Without a connection to a cluster there are no hooks, so that
`helm template` returns the same bytes anywhere.
Input: the dict of tokenmill.workload. Output: hooks, comma-separated.
  {{ include "tokenmill.clearingHooks" . }}
*/}}
{{- define "tokenmill.clearingHooks" -}}
{{- $hooks := list -}}
{{- if and (not .neverClear) (eq (include "tokenmill.connected" .root) "true") -}}
{{- if eq (include "tokenmill.state" .) "outdated" }}{{ $hooks = append $hooks "pre-upgrade" }}{{ end -}}
{{- if ne .onRollback "keep" }}{{ $hooks = append $hooks "pre-rollback" }}{{ end -}}
{{- end -}}
{{- join "," $hooks -}}
{{- end }}

{{/*
Return the state of the cluster's object: absent; current; or outdated, if it has another hash, failed, has pods of another
hash, or if Kueue changed it so that Helm cannot update it. Input: the dict of tokenmill.workload, with "outdated": true if
the caller found such pods. Output: a word.
  {{ if eq (include "tokenmill.state" .) "outdated" }}
*/}}
{{- define "tokenmill.state" -}}
{{- $existing := include "tokenmill.existingObject" . | fromYaml -}}
{{- if not $existing }}absent
{{- else -}}
{{- $annotations := $existing.metadata.annotations | default dict -}}
{{- $outdated := or .outdated (ne (index $annotations "tokenmill/spec") .hash) (include "tokenmill.admittedOtherwise" (dict "existing" $existing "spec" .spec)) -}}
{{- range ($existing.status).conditions }}{{ if and (eq .type "Failed") (eq .status "True") }}{{ $outdated = true }}{{ end }}{{ end -}}
{{- ternary "outdated" "current" (not (empty $outdated)) -}}
{{- end -}}
{{- end }}

{{/*
Return an object of the cluster; nothing if it does not exist, if there is no connection, or if the cluster lacks the
kind, which would abort the render. Input: dict "root" "apiVersion" "kind" "name". Output: YAML.
  {{ $existing := include "tokenmill.existingObject" . | fromYaml }}
*/}}
{{- define "tokenmill.existingObject" -}}
{{- if or (eq .kind "Job") (.root.Capabilities.APIVersions.Has (printf "%s/%s" .apiVersion .kind)) -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- end }}

{{/*
Return whether this render can read the cluster; every namespace has this ConfigMap. Input: $. Output: true or nothing.
  {{ if eq (include "tokenmill.connected" .) "true" }}
*/}}
{{- define "tokenmill.connected" -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" }}true{{ end -}}
{{- end }}
