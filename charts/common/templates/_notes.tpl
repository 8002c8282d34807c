{{/*
What a stage's installation says: how to follow it, what to do when it fails, and the next command.
Input: the stage's dict, and "next", the stage that usually follows, or none. Output: text.
  {{ include "tokenmill.notes" (dict "root" . "stage" "extract" "next" "preprocess") }}
*/}}
{{- define "tokenmill.notes" -}}
{{- $release := .root.Release -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $found := include "tokenmill.directories" . | fromYaml -}}
{{- $n := "" }}{{ if ne $release.Namespace "default" }}{{ $n = printf " -n %s" $release.Namespace }}{{ end -}}
{{- $job := printf "job/%s" (include "tokenmill.name" .) -}}
{{- if eq .root.Values.job.naming "hash" }}{{ $job = printf "$(kubectl get job -o name -l app.kubernetes.io/instance=%s%s)" $release.Name $n }}{{ end -}}
Follow it:          kubectl get {{ $job }}{{ $n }}
                    kubectl logs -f {{ $job }}{{ $n }}
How far it is:      kubectl exec {{ $job }}{{ $n }} -- tokenmill status {{ $paths.about }}
Wait for the end:   kubectl wait --for=condition=Complete --timeout=24h {{ $job }}{{ $n }}
Check the output:   helm test {{ $release.Name }}{{ $n }} --timeout 24h
When it failed:     kubectl logs -l app.kubernetes.io/instance={{ $release.Name }},app.kubernetes.io/component={{ .stage }}{{ $n }} --tail=20 --prefix
                    helm upgrade {{ $release.Name }} charts/dataset-{{ .stage }} --reuse-values{{ $n }}   (does only what is missing)
{{- if .next }}

Next, when it is complete:
  helm install dataset-{{ .next }} charts/dataset-{{ .next }}{{ $n }} \
    --set storage.pvcName={{ .root.Values.storage.outputPvcName | default .root.Values.storage.pvcName }} --set dataset.inputPath={{ ternary $found.writes $found.reads (or (eq .stage "download") (not (empty .root.Values.storage.outputPvcName))) }}
{{- end }}
{{- end }}
