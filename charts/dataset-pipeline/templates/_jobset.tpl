{{/*
Return the JobSet and the hooks that delete it. Its spec is immutable, except ttlSecondsAfterFinished.
Input: $. Output: documents.
  {{ include "dataset-pipeline.objects" . }}
*/}}
{{- define "dataset-pipeline.objects" -}}
{{- include "tokenmill.workload" (dict "root" . "apiVersion" "jobset.x-k8s.io/v1alpha2" "kind" "JobSet" "trialLength" 14
      "name" (include "dataset-pipeline.name" .)
      "hash" (include "dataset-pipeline.hash" .)
      "spec" (include "dataset-pipeline.jobset" (dict "root" . "empty" false))
      "empty" (include "dataset-pipeline.jobset" (dict "root" . "empty" true))
      "pods" (include "dataset-pipeline.pods" . | fromJson)
      "neverClear" (ne .Values.job.naming "release")
      "onRollback" .Values.job.onRollback) }}
{{- end }}

{{/*
Return the pod template of each stage's Job. Input: $. Output: JSON of stage to YAML, in which numbers
are without exponents.
  {{ include "dataset-pipeline.pods" . | fromJson }}
*/}}
{{- define "dataset-pipeline.pods" -}}
{{- $pods := dict -}}
{{- range (include "dataset-pipeline.jobsetSpec" . | fromYaml).replicatedJobs }}{{ $_ := set $pods .name (toJson .template.spec.template) }}{{ end -}}
{{ toJson $pods }}
{{- end }}

{{/*
Return a hash of the fields whose change requires another JobSet. Input: $. Output: hex digits.
  {{ include "dataset-pipeline.hash" . }}
*/}}
{{- define "dataset-pipeline.hash" -}}
{{- $more := concat (list (toString .Values.job.runAgain)) (include "tokenmill.queueIdentity" . | fromJsonArray) -}}
{{- list (include "dataset-pipeline.jobsetSpec" . | fromYaml) $more | toJson | sha256sum | trunc 16 -}}
{{- end }}

{{/*
Return the name of the JobSet: the release's, with the hash for tools that apply rendered files (`job.naming: hash`).
Input: $. Output: a name.
  {{ include "dataset-pipeline.name" . }}
*/}}
{{- define "dataset-pipeline.name" -}}
{{- .Release.Name -}}
{{- if eq .Values.job.naming "hash" }}-{{ include "dataset-pipeline.hash" . | trunc 8 }}{{ end -}}
{{- end }}

{{/*
Return the complete spec of the JobSet. Input: dict "root" $, "empty": true for one that runs nothing. Output: YAML.
  {{ include "dataset-pipeline.jobset" (dict "root" . "empty" false) }}
*/}}
{{- define "dataset-pipeline.jobset" -}}
{{- $secondsAfterFinished := .root.Values.job.ttlSecondsAfterFinished -}}
{{- if .empty -}}
suspend: true
{{ else if not (kindIs "invalid" $secondsAfterFinished) -}}
ttlSecondsAfterFinished: {{ toJson $secondsAfterFinished }}
{{ end -}}
{{ include "dataset-pipeline.jobsetSpec" .root }}
{{- end }}

{{/*
Return the part of the spec that runs. It has no failurePolicy: a Job that fails after all of its own retries then fails the
JobSet, and JobSet does not create the Jobs that depend on it. Input: $. Output: YAML.
  {{ include "dataset-pipeline.jobsetSpec" . | fromYaml }}
*/}}
{{- define "dataset-pipeline.jobsetSpec" -}}
network: {enableDNSHostnames: false}
successPolicy: {operator: All}
replicatedJobs:
{{- include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.replicatedJob") | trim | nindent 2 }}
{{- end }}

{{/*
Return the replicated Job of one stage, with the spec of the stage's own chart. Input: the stage's dict, see
dataset-pipeline.forEachStage. Output: YAML.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.replicatedJob") }}
*/}}
{{- define "dataset-pipeline.replicatedJob" }}
- name: {{ .stage }}
  groupName: default
  replicas: 1
  {{- with .previousStage }}
  dependsOn: [{name: {{ . }}, status: Complete}]
  {{- end }}
  template:
    spec: {{- include "tokenmill.fullJobSpec" (merge (dict "empty" false) .) | nindent 6 }}
{{- end }}
