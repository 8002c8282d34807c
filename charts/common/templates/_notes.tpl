{{/*
Return the notes of a stage: how to follow it, how to repair a failure, and the next command.
Input: the stage's dict; "summary", a sentence; "next", the stage that usually follows, or empty. Output: text.
  {{ include "tokenmill.notes" (dict "root" . "stage" "extract" "summary" "..." "next" "preprocess") }}
*/}}
{{- define "tokenmill.notes" -}}
{{- $release := .root.Release -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- $directories := include "tokenmill.directories" . | fromYaml -}}
{{- $namespace := "" }}{{ if ne $release.Namespace "default" }}{{ $namespace = printf " -n %s" $release.Namespace }}{{ end -}}
{{- /* A stage finds the outputs below a dataset's root; an output outside of it must be named. */}}
{{- $next := $directories.reads -}}
{{- if and $directories.writes (or .root.Values.storage.outputPvcName (not (hasPrefix (printf "%s/" $directories.reads) $directories.writes))) }}{{ $next = $directories.writes }}{{ end -}}
{{- $job := printf "job/%s" (include "tokenmill.name" .) -}}
{{- if eq .root.Values.job.naming "hash" }}{{ $job = printf "$(kubectl get job -o name -l app.kubernetes.io/instance=%s%s)" $release.Name $namespace }}{{ end -}}
{{- $pods := printf "-l app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s%s" $release.Name .stage $namespace -}}
{{ .summary }}
Logs:               kubectl logs -f {{ $job }}{{ $namespace }}   (after its pod has started)
Progress:           kubectl exec {{ $job }}{{ $namespace }} -- tokenmill status {{ include "tokenmill.shellWord" $paths.status }}
Wait for the end:   until kubectl get {{ $job }}{{ $namespace }} -o 'jsonpath={.status.conditions[*].type}' | grep -E 'Complete|Failed'; do sleep 5; done
Check the output:   helm test {{ $release.Name }}{{ $namespace }} --timeout 24h
After a failure:    kubectl logs {{ $pods }} --tail=20 --prefix
                    helm upgrade {{ $release.Name }} charts/dataset-{{ .stage }} --reset-then-reuse-values{{ $namespace }}   (repeats only missing work)
If no pod starts:   kubectl describe {{ $job }}{{ $namespace }}   (quota, Pod Security)
                    kubectl describe pods {{ $pods }}   (nodes, volumes, images)
{{- include "tokenmill.queueNote" .root }}
{{- if .next }}

Next, after completion:
  helm install dataset-{{ .next }} charts/dataset-{{ .next }}{{ $namespace }} {{ include "tokenmill.sharedSettings" . }} \
    {{ include "tokenmill.setOption" (list "dataset.inputPath" $next) }}{{ if has .next (list "preprocess" "chat") }} --set tokenizer.name=NAME{{ end }}
{{- end }}
{{- end }}

{{/*
Return the settings of this release that the next stage needs too. Input: the stage's dict. Output: options of helm.
  {{ include "tokenmill.sharedSettings" . }}
*/}}
{{- define "tokenmill.sharedSettings" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
{{- $separate := not (empty $storage.outputPvcName) -}}
{{- with ternary $storage.outputPvcName $storage.pvcName $separate }}{{ include "tokenmill.setOption" (list "storage.pvcName" .) }}{{ end }}
{{- with ternary $storage.outputSubPath $storage.subPath $separate }} {{ include "tokenmill.setOption" (list "storage.subPath" .) }}{{ end }}
{{- if ne $values.image.repository "localhost/tokenmill-jobs" }} {{ include "tokenmill.setOption" (list "image.repository" $values.image.repository) }}{{ end }}
{{- with $values.image.tag }} {{ include "tokenmill.setOption" (list "image.tag" (toJson . | trimAll "\"")) }}{{ end }}
{{- with $values.image.digest }} {{ include "tokenmill.setOption" (list "image.digest" .) }}{{ end }}
{{- with ($values.hub.tokenSecret).name }} {{ include "tokenmill.setOption" (list "hub.tokenSecret.name" .) }}{{ end }}
{{- end }}

{{/*
Return an option of helm, quoted for a shell. Input: list of key and value. Output: --set KEY=VALUE.
  {{ include "tokenmill.setOption" (list "dataset.inputPath" "slimpajama") }}
*/}}
{{- define "tokenmill.setOption" -}}
{{- $quoted := include "tokenmill.shellWord" (last .) -}}
{{ ternary "--set" "--set-literal" (eq $quoted (last .)) }} {{ first . }}={{ $quoted }}
{{- end }}

{{/*
Return a string, quoted for a shell if necessary. Input: a string. Output: a word of a shell command.
  {{ include "tokenmill.shellWord" "/data/my corpus" }}
*/}}
{{- define "tokenmill.shellWord" -}}
{{- if regexMatch "^[A-Za-z0-9_./:@%+-]+$" . }}{{ . }}{{ else }}'{{ replace "'" "'\\''" . }}'{{ end -}}
{{- end }}
