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
{{- /* A stage finds what was made below a dataset's root; what lies apart from it must be named. */}}
{{- $next := $found.reads -}}
{{- if and $found.writes (or .root.Values.storage.outputPvcName (not (hasPrefix (printf "%s/" $found.reads) $found.writes))) }}{{ $next = $found.writes }}{{ end -}}
{{- $job := printf "job/%s" (include "tokenmill.name" .) -}}
{{- if eq .root.Values.job.naming "hash" }}{{ $job = printf "$(kubectl get job -o name -l app.kubernetes.io/instance=%s%s)" $release.Name $n }}{{ end -}}
{{- $pods := printf "-l app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s%s" $release.Name .stage $n -}}
{{ .said }}
Follow it:          kubectl logs -f {{ $job }}{{ $n }}   (once its pod has started)
How far it is:      kubectl exec {{ $job }}{{ $n }} -- tokenmill status {{ include "tokenmill.typed" $paths.about }}
Wait for its end:   until kubectl get {{ $job }}{{ $n }} -o 'jsonpath={.status.conditions[*].type}' | grep -E 'Complete|Failed'; do sleep 5; done
Check the output:   helm test {{ $release.Name }}{{ $n }} --timeout 24h
When it failed:     kubectl logs {{ $pods }} --tail=20 --prefix
                    helm upgrade {{ $release.Name }} charts/dataset-{{ .stage }} --reset-then-reuse-values{{ $n }}   (does only what is missing)
When none starts:   kubectl describe {{ $job }}{{ $n }}   (pods that quota or Pod Security forbid)
                    kubectl describe pods {{ $pods }}   (nodes, volumes, images)
{{- if .next }}

Next, when it is complete:
  helm install dataset-{{ .next }} charts/dataset-{{ .next }}{{ $n }} {{ include "tokenmill.carried" . }} \
    {{ include "tokenmill.setting" (list "dataset.inputPath" $next) }} --set tokenizer.name=NAME
{{- end }}
{{- end }}

{{/*
Settings of this release that the next stage needs as well. Input: the stage's dict. Output: options of helm.
  {{ include "tokenmill.carried" . }}
*/}}
{{- define "tokenmill.carried" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
{{- $apart := not (empty $storage.outputPvcName) -}}
{{- include "tokenmill.setting" (list "storage.pvcName" (ternary $storage.outputPvcName $storage.pvcName $apart)) }}
{{- with ternary $storage.outputSubPath $storage.subPath $apart }} {{ include "tokenmill.setting" (list "storage.subPath" .) }}{{ end }}
{{- if ne $values.image.repository "localhost/tokenmill-jobs" }} {{ include "tokenmill.setting" (list "image.repository" $values.image.repository) }}{{ end }}
{{- with $values.image.tag }} {{ include "tokenmill.setting" (list "image.tag" (toJson . | trimAll "\"")) }}{{ end }}
{{- with $values.image.digest }} {{ include "tokenmill.setting" (list "image.digest" .) }}{{ end }}
{{- with $values.hub.tokenSecret.name }} {{ include "tokenmill.setting" (list "hub.tokenSecret.name" .) }}{{ end }}
{{- end }}

{{/*
An option of helm as it can be typed. Input: list of key and value. Output: --set KEY=VALUE.
  {{ include "tokenmill.setting" (list "dataset.inputPath" "slimpajama") }}
*/}}
{{- define "tokenmill.setting" -}}
{{- $typed := include "tokenmill.typed" (last .) -}}
{{ ternary "--set" "--set-literal" (eq $typed (last .)) }} {{ first . }}={{ $typed }}
{{- end }}

{{/*
A word as it can be typed in a shell. Input: a string. Output: the same, quoted where it must be.
  {{ include "tokenmill.typed" "/data/my corpus" }}
*/}}
{{- define "tokenmill.typed" -}}
{{- if regexMatch "^[A-Za-z0-9_./:@%+-]+$" . }}{{ . }}{{ else }}'{{ replace "'" "'\\''" . }}'{{ end -}}
{{- end }}
