{{/*
The JobSet and what clears its place. All of its spec but what happens after its end is immutable.
Input: $. Output: documents.
  {{ include "dataset-pipeline.objects" . }}
*/}}
{{- define "dataset-pipeline.objects" -}}
{{- include "tokenmill.workload" (dict "root" . "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" "trialLength" 14
      "name" (include "dataset-pipeline.name" .)
      "hash" (include "dataset-pipeline.hash" .)
      "spec" (include "dataset-pipeline.jobset" (dict "root" . "empty" false))
      "empty" (include "dataset-pipeline.jobset" (dict "root" . "empty" true))
      "kept" (ne .Values.job.naming "release")
      "onRollback" .Values.job.onRollback) }}
{{- end }}

{{/*
Hash of what needs another JobSet. Input: $. Output: hex digits.
  {{ include "dataset-pipeline.hash" . }}
*/}}
{{- define "dataset-pipeline.hash" -}}
{{- $more := list (toString .Values.job.runAgain) (.Values.kueue.queueName | default "") -}}
{{- list (include "dataset-pipeline.jobsetSpec" . | fromYaml) $more | toJson | sha256sum | trunc 16 -}}
{{- end }}

{{/*
The name of the JobSet: the release's, or with the hash in it for tools that apply rendered files (`job.naming: hash`).
Input: $. Output: a name.
  {{ include "dataset-pipeline.name" . }}
*/}}
{{- define "dataset-pipeline.name" -}}
{{- .Release.Name -}}
{{- if eq .Values.job.naming "hash" }}-{{ include "dataset-pipeline.hash" . | trunc 8 }}{{ end -}}
{{- end }}

{{/*
The JobSet's whole spec. Input: dict "root" $, "empty": true for one that runs nothing. Output: YAML.
  {{ include "dataset-pipeline.jobset" (dict "root" . "empty" false) }}
*/}}
{{- define "dataset-pipeline.jobset" -}}
{{- $after := .root.Values.job.ttlSecondsAfterFinished -}}
{{- if .empty -}}
suspend: true
{{ else if not (kindIs "invalid" $after) -}}
ttlSecondsAfterFinished: {{ toJson $after }}
{{ end -}}
{{ include "dataset-pipeline.jobsetSpec" .root }}
{{- end }}

{{/*
The part of it that runs. Without a failurePolicy a Job that has failed, after all of its own retries, fails the JobSet,
and what depends on it is never made. Input: $. Output: YAML.
  {{ include "dataset-pipeline.jobsetSpec" . | fromYaml }}
*/}}
{{- define "dataset-pipeline.jobsetSpec" -}}
network: {enableDNSHostnames: false}
successPolicy: {operator: All}
replicatedJobs:
{{- include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.replicatedJob") | trim | nindent 2 }}
{{- end }}

{{/*
One stage of it: the Job of the stage's own chart. Input: the stage's dict, see dataset-pipeline.each. Output: YAML.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.replicatedJob") }}
*/}}
{{- define "dataset-pipeline.replicatedJob" }}
- name: {{ .stage }}
  groupName: default
  replicas: 1
  {{- with .before }}
  dependsOn: [{name: {{ . }}, status: Complete}]
  {{- end }}
  template:
    spec: {{- include "tokenmill.jobWhole" (merge (dict "clear" false) .) | nindent 6 }}
{{- end }}
