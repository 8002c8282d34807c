{{/*
One template for each enabled stage, in the order in which data flows.
Input: dict "root" $, "template": what takes the stage's dict (see tokenmill.stage), to which these are added:
  name     of what runs the stage, before an index
  section  what its keys begin with: `preprocess.`; in its root too, for the stage's own templates
  before   the enabled stage before it; empty for the first
  previous that one's values
Output: what the templates give.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "tokenmill.test") }}
*/}}
{{- define "dataset-pipeline.each" -}}
{{- $root := .root -}}
{{- $before := "" -}}{{- $previous := dict -}}
{{- range $stage := $root.Files.Get "stages.yaml" | fromYamlArray -}}
{{- if (index $root.Values $stage).enabled -}}
{{- $values := include "dataset-pipeline.values" (dict "root" $root "stage" $stage "before" $before) | fromJson -}}
{{- $section := printf "%s." $stage -}}
{{- $own := merge (dict "Values" $values "section" $section) (pick $root "Chart" "Release" "Capabilities") -}}
{{- $dict := dict "root" $own "stage" $stage "name" (printf "%s-%s" $root.Release.Name $stage) "section" $section "before" $before "previous" $previous -}}
{{- include $.template (merge $dict (include (printf "dataset-%s.command" $stage) $own | fromJson)) -}}
{{- $before = $stage -}}{{- $previous = $values -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
The values of a stage's own chart: its section over what is for all stages. A stage reads what the one before it made,
and what removes a finished Job is the JobSet's alone: JobSet would make it again.
Input: dict "root" $, "stage", "before": the enabled stage before it. Output: JSON.
  {{ $values := include "dataset-pipeline.values" (dict "root" . "stage" "preprocess" "before" "download") | fromJson }}
*/}}
{{- define "dataset-pipeline.values" -}}
{{- $shared := deepCopy .root.Values -}}
{{- range .root.Files.Get "stages.yaml" | fromYamlArray }}{{ $_ := unset $shared . }}{{ end -}}
{{- $values := include "tokenmill.over" (list (index .root.Values .stage) $shared) | fromJson -}}
{{- $_ := unset $values.job "ttlSecondsAfterFinished" -}}
{{- if and .before (not $values.dataset.inputPath) (not $values.dataset.fromStage) (not $values.dataset.stream) -}}
{{- $_ := set $values.dataset "fromStage" .before -}}
{{- end -}}
{{ toJson $values }}
{{- end }}

{{/*
What a stage reads, and where its records are found, as its pods see them. Input: the stage's dict. Output: JSON with a
comma after it.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.place") }}
*/}}
{{- define "dataset-pipeline.place" -}}
{{- $paths := include "tokenmill.paths" . | fromYaml -}}
{{- dict "stage" .stage "reads" (.source | default $paths.reads) "about" $paths.about | toJson }},
{{- end }}

{{/*
The command that follows the last stage, where that is preprocess. Input: the stage's dict. Output: text, or nothing.
  {{ include "dataset-pipeline.each" (dict "root" . "template" "dataset-pipeline.next") }}
*/}}
{{- define "dataset-pipeline.next" -}}
{{- if eq .stage "preprocess" }}

{{ include "dataset-preprocess.next" . }}
{{- end }}
{{- end }}
