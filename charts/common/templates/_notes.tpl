{{/*
What a stage's installation says: how to follow it, what to do when it fails, and the next command.
Input: the stage's dict; "said", what it does with what; "next", the stage that usually follows, or none. Output: text.
  {{ include "tokenmill.notes" (dict "root" . "stage" "extract" "said" "..." "next" "preprocess") }}
*/}}
{{- define "tokenmill.notes" -}}
{{- $release := .root.Release -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $found := include "tokenmill.directories" . | fromYaml -}}
{{- $n := "" }}{{ if ne $release.Namespace "default" }}{{ $n = printf " -n %s" $release.Namespace }}{{ end -}}
{{- $job := printf "job/%s" (include "tokenmill.name" .) -}}
{{- if eq .root.Values.job.naming "hash" }}{{ $job = printf "$(kubectl get job -o name -l app.kubernetes.io/instance=%s%s)" $release.Name $n }}{{ end -}}
{{- $pods := printf "-l app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s%s" $release.Name .stage $n -}}
{{ .said }}
Follow it:          kubectl logs -f {{ $job }}{{ $n }} --pod-running-timeout=10m
How far it is:      kubectl exec {{ $job }}{{ $n }} -- tokenmill status {{ $paths.about }}
Wait for its end:   until kubectl get {{ $job }}{{ $n }} -o 'jsonpath={.status.conditions[*].type}' | grep -E 'Complete|Failed'; do sleep 5; done
Check the output:   helm test {{ $release.Name }}{{ $n }} --timeout 24h
When it failed:     kubectl logs {{ $pods }} --tail=20 --prefix
                    helm upgrade {{ $release.Name }} charts/dataset-{{ .stage }} --reuse-values{{ $n }}   (does only what is missing)
When none starts:   kubectl describe pods {{ $pods }}
{{- if .next }}

Next, when it is complete:
  helm install dataset-{{ .next }} charts/dataset-{{ .next }}{{ $n }} {{ include "tokenmill.carried" . }} \
    --set dataset.inputPath={{ ternary $found.writes $found.reads (or (eq .stage "download") (not (empty .root.Values.storage.outputPvcName))) }} --set tokenizer.name=NAME
{{- end }}
{{- end }}

{{/*
Settings of this release that the next stage needs as well. Input: the stage's dict. Output: --set flags.
  {{ include "tokenmill.carried" . }}
*/}}
{{- define "tokenmill.carried" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
{{- $carried := list (printf "--set storage.pvcName=%s" ($storage.outputPvcName | default $storage.pvcName)) -}}
{{- with ternary $storage.outputSubPath $storage.subPath (not (empty $storage.outputPvcName)) }}{{ $carried = append $carried (printf "--set storage.subPath=%s" .) }}{{ end -}}
{{- if ne $values.image.repository "localhost/tokenmill-jobs" }}{{ $carried = append $carried (printf "--set image.repository=%s" $values.image.repository) }}{{ end -}}
{{- with $values.image.tag }}{{ $carried = append $carried (printf "--set image.tag=%s" (toJson . | trimAll "\"")) }}{{ end -}}
{{- with $values.hub.tokenSecret.name }}{{ $carried = append $carried (printf "--set hub.tokenSecret.name=%s" .) }}{{ end -}}
{{- join " " $carried -}}
{{- end }}
