{{/*
Return the pod of `helm test`, which runs tokenmill verify on the stage's output.
Input: the stage's dict. Output: a document.
  {{ include "tokenmill.test" . }}
*/}}
{{- define "tokenmill.test" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $flags := include "tokenmill.flags" (dict "stage" .stage "quick" (ternary true nil .root.Values.verify.quick)) -}}
{{- $arguments := printf "- verify\n- %s%s" (include "tokenmill.argument" $paths.status) $flags -}}
{{- $pod := merge (dict "arguments" $arguments "environment" "" "component" "verify") . }}
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "tokenmill.name" . }}-verify
  labels: {{- include "tokenmill.podLabels" $pod | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
    {{- with .root.Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec: {{- include "tokenmill.podSpec" $pod | nindent 2 }}
{{- end }}
