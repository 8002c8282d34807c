{{/*
Include one template for each enabled stage, in the order of the data flow.
Input: dict "root" $, "template": a template that takes the stage's dict (see tokenmill.stage), with these additional keys:
  name            name of the stage's Job before an index
  section         prefix of its keys: `preprocess.`; in its root too, for the stage's own templates
  previousStage   name of the enabled stage that it reads: the last one in the order of the data flow; empty if there is none
  previousValues  values of that stage
  owner           kind of the object that announcements are about, and the pods' label with its name
Output: the output of the templates.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "tokenmill.test") }}
*/}}
{{- define "dataset-pipeline.forEachStage" -}}
{{- $root := .root -}}
{{- $enabled := dict -}}
{{- range $root.Files.Get "stages.yaml" | fromYamlArray -}}
{{- $stage := .name -}}
{{- if (index $root.Values $stage).enabled -}}
{{- $previousStage := "" }}{{ range .reads }}{{ if hasKey $enabled . }}{{ $previousStage = . }}{{ end }}{{ end -}}
{{- $values := include "dataset-pipeline.values" (dict "root" $root "stage" $stage "previousStage" $previousStage) | fromJson -}}
{{- $section := printf "%s." $stage -}}
{{- $stageRoot := merge (dict "Values" $values "section" $section) (pick $root "Chart" "Release" "Capabilities") -}}
{{- $stageDict := dict "root" $stageRoot "stage" $stage "name" (printf "%s-%s" $root.Release.Name $stage) "section" $section "previousStage" $previousStage "previousValues" (get $enabled $previousStage | default dict) "owner" (dict "kind" "jobset.x-k8s.io/v1alpha2/JobSet" "label" "jobset.sigs.k8s.io/jobset-name") -}}
{{- include $.template (merge $stageDict (include (printf "dataset-%s.command" $stage) $stageRoot | fromJson)) -}}
{{- $_ := set $enabled $stage $values -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Return the values of a stage's own chart: its section, merged over the values for all stages. A stage reads the output of
its previous stage. ttlSecondsAfterFinished applies only to the JobSet: JobSet would recreate a Job that it removes.
Input: dict "root" $, "stage", "previousStage": the enabled stage that it reads. Output: JSON.
  {{ $values := include "dataset-pipeline.values" (dict "root" . "stage" "preprocess" "previousStage" "download") | fromJson }}
*/}}
{{- define "dataset-pipeline.values" -}}
{{- $shared := deepCopy .root.Values -}}
{{- range .root.Files.Get "stages.yaml" | fromYamlArray }}{{ $_ := unset $shared .name }}{{ end -}}
{{- $values := include "tokenmill.mergedValues" (list (index .root.Values .stage) $shared) | fromJson -}}
{{- $_ := unset $values.job "ttlSecondsAfterFinished" -}}
{{- if and .previousStage (not (or $values.dataset.inputPath $values.dataset.fromStage $values.dataset.stream $values.dataset.blend)) -}}
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
Return the next step after a stage whose output a training reads. Input: the stage's dict. Output: text, or nothing.
  {{ include "dataset-pipeline.forEachStage" (dict "root" . "template" "dataset-pipeline.next") }}
*/}}
{{- define "dataset-pipeline.next" -}}
{{- if has .stage (list "preprocess" "pack") }}

{{ include (printf "dataset-%s.next" .stage) . }}
{{- end }}
{{- end }}
