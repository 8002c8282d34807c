{{/*
Return the labels for Kueue of an object that runs pods. Kueue sets `suspend` itself; a chart that renders the field too
would overwrite it. Input: $. Output: YAML of labels, or nothing.
  {{ with include "tokenmill.queueLabels" . }}{{ . | nindent 4 }}{{ end }}
*/}}
{{- define "tokenmill.queueLabels" -}}
{{- $labels := dict -}}
{{- with .Values.kueue.queueName }}{{ $_ := set $labels "kueue.x-k8s.io/queue-name" . }}{{ end -}}
{{- with .Values.kueue.priorityClass }}{{ $_ := set $labels "kueue.x-k8s.io/priority-class" . }}{{ end -}}
{{- if $labels }}{{ toYaml $labels }}{{ end -}}
{{- end }}

{{/*
Return the values for Kueue whose change requires another object: the queue, and whether the object has a priority class,
which Kueue neither adds to a running object nor removes. It accepts another class at any time. Input: $. Output: a JSON list.
  {{ $parts := include "tokenmill.queueIdentity" . | fromJsonArray }}
*/}}
{{- define "tokenmill.queueIdentity" -}}
{{- $parts := list (.Values.kueue.queueName | default "") -}}
{{- if .Values.kueue.priorityClass }}{{ $parts = append $parts "priority" }}{{ end -}}
{{- with .Values.kueue.minWorkers }}{{ $parts = append $parts (int64 .) }}{{ end -}}
{{ toJson $parts }}
{{- end }}

{{/*
Return whether Kueue admitted a Job with fields that Helm would set back, and that cannot change while the Job runs: fewer
workers, or more tolerations than the values have. Input: dict "existing" of the cluster's object, "spec" (YAML of the
rendered one). Output: true or nothing.
  {{ include "tokenmill.admittedOtherwise" (dict "existing" $existing "spec" .spec) }}
*/}}
{{- define "tokenmill.admittedOtherwise" -}}
{{- $existing := .existing -}}
{{- $spec := fromYaml .spec -}}
{{- if and (eq $existing.kind "Job") (index ($existing.metadata.labels | default dict) "kueue.x-k8s.io/queue-name") -}}
{{- $tolerations := $spec.template.spec.tolerations -}}
{{- $fewer := ne (int64 $existing.spec.parallelism) (int64 $spec.parallelism) -}}
{{- if or $fewer (and $tolerations (ne (toJson $tolerations) (toJson $existing.spec.template.spec.tolerations))) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/*
Return the line of the notes that shows whether Kueue has admitted the object. Input: $. Output: text after a line break, or
nothing.
  {{- include "tokenmill.queueNote" . }}
*/}}
{{- define "tokenmill.queueNote" -}}
{{- if .Values.kueue.queueName }}
{{- $namespace := "" }}{{ if ne .Release.Namespace "default" }}{{ $namespace = printf " -n %s" .Release.Namespace }}{{ end }}
In the queue:       kubectl describe workloads.kueue.x-k8s.io{{ $namespace }} | grep -E '^Name:|Message:'   (why it waits)
{{- end }}
{{- end }}
