{{/*
Include one template for each enabled stage, in the order of the data flow.
Input: dict "root" $, "template": a template that takes the stage's dict (see tokenmill.stage), with these additional keys:
  name            name of the stage's Job before an index
  section         prefix of its keys: `preprocess.`; in its root too, for the stage's own templates
  previousStage   name of the enabled stage before it; empty for the first stage
  previousValues  values of that stage
Output: the output of the templates.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "tokenmill.test") }}
*/}}
{{- define "dataset-pipeline.forEachStage" -}}
{{- $root := .root -}}
{{- $previousStage := "" -}}{{- $previousValues := dict -}}
{{- range $stage := $root.Files.Get "stages.yaml" | fromYamlArray -}}
{{- if (index $root.Values $stage).enabled -}}
{{- $values := include "dataset-pipeline.values" (dict "root" $root "stage" $stage "previousStage" $previousStage) | fromJson -}}
{{- $section := printf "%s." $stage -}}
{{- $stageRoot := merge (dict "Values" $values "section" $section) (pick $root "Chart" "Release" "Capabilities") -}}
{{- $stageDict := dict "root" $stageRoot "stage" $stage "name" (printf "%s-%s" $root.Release.Name $stage) "section" $section "previousStage" $previousStage "previousValues" $previousValues -}}
{{- include $.template (merge $stageDict (include (printf "dataset-%s.command" $stage) $stageRoot | fromJson)) -}}
{{- $previousStage = $stage -}}{{- $previousValues = $values -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Return the values of a stage's own chart: its section, merged over the values for all stages. A stage reads the output of
the stage before it. ttlSecondsAfterFinished applies only to the JobSet: JobSet would recreate a Job that it removes.
Input: dict "root" $, "stage", "previousStage": the enabled stage before it. Output: JSON.
  {{ $values := include "dataset-pipeline.values" (dict "root" . "stage" "preprocess" "previousStage" "download") | fromJson }}
*/}}
{{- define "dataset-pipeline.values" -}}
{{- $shared := deepCopy .root.Values -}}
{{- range .root.Files.Get "stages.yaml" | fromYamlArray }}{{ $_ := unset $shared . }}{{ end -}}
{{- $values := include "tokenmill.mergedValues" (list (index .root.Values .stage) $shared) | fromJson -}}
{{- $_ := unset $values.job "ttlSecondsAfterFinished" -}}
{{- if and .previousStage (not $values.dataset.inputPath) (not $values.dataset.fromStage) (not $values.dataset.stream) -}}
{{- $_ := set $values.dataset "fromStage" .previousStage -}}
{{- end -}}
{{ toJson $values }}
{{- end }}

{{/*
Return the source or directory that a stage reads, and the directory for `tokenmill status`, as paths in its pods.
Input: the stage's dict. Output: JSON with a comma after it.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.stageDirectories") }}
*/}}
{{- define "dataset-pipeline.stageDirectories" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- dict "stage" .stage "reads" (.source | default $paths.reads) "status" $paths.status | toJson }},
{{- end }}

{{/*
Return the command for the next step after the last stage, if that is preprocess. Input: the stage's dict. Output: text, or
nothing.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.next") }}
*/}}
{{- define "dataset-pipeline.next" -}}
{{- if eq .stage "preprocess" }}

{{ include "dataset-preprocess.next" . }}
{{- end }}
{{- end }}
