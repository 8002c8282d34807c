{{/*
Return the Job that converts a model of the Hub, or of a directory, to a checkpoint with the weights that a run starts with.
Only its pod gets the Hub's token. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.import" . }}
*/}}
{{- define "megatron-training.import" -}}
{{- $import := .Values.checkpoint.import -}}
{{- if $import.enabled }}
{{- $environment := "" -}}
{{- with $import.tokenSecret }}
{{- if .name }}{{ $environment = printf "- name: HF_TOKEN\n  valueFrom: {secretKeyRef: {name: %s, key: %s}}" (toJson .name) (toJson .key) }}{{ end }}
{{- end }}
{{- include "megatron-training.job" (dict "root" . "stage" "import" "section" $import "environment" $environment
      "arguments" (include "megatron-training.conversion" (dict
        "command" "import"
        "paths" (list $import.source (include "megatron-training.outputPath" (list . "import")))
        "flags" (dict "revision" $import.revision)))) }}
{{- end }}
{{- end }}

{{/*
Return the Job that converts a checkpoint of the run to a model of Hugging Face. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.export" . }}
*/}}
{{- define "megatron-training.export" -}}
{{- $export := .Values.checkpoint.export -}}
{{- if $export.enabled }}
{{- include "megatron-training.job" (dict "root" . "stage" "export" "section" $export "environment" ""
      "arguments" (include "megatron-training.conversion" (dict
        "command" "export"
        "paths" (list (include "megatron-training.outputPath" (list . "checkpoints")) (include "megatron-training.outputPath" (list . "export")))
        "flags" (dict "iteration" $export.iteration)))) }}
{{- end }}
{{- end }}

{{/*
Return the arguments of `tokenmill checkpoint`. Input: dict "command", "paths" (a list of input and output), "flags" (a dict).
Output: a YAML list.
  {{ include "megatron-training.conversion" (dict "command" "export" "paths" (list "/data/a" "/data/b") "flags" dict) }}
*/}}
{{- define "megatron-training.conversion" -}}
- checkpoint
- {{ .command }}
{{- range .paths }}
- {{ include "tokenmill.argument" . }}
{{- end }}
{{- include "tokenmill.flags" .flags }}
{{- end }}

{{/*
Return the container that waits for the import before the run's program starts, because Helm creates the Job and the run
at the same time. It also ends if the run has a checkpoint of its own, which needs no import, and after waitMinutes:
`tokenmill train` then fails for good, which frees the GPUs; the failure of a container before it would be retried.
Input: $. Output: YAML of a list of containers, or nothing if the run does not start with the import's weights.
  initContainers: {{ include "megatron-training.importWait" . | nindent 4 }}
*/}}
{{- define "megatron-training.importWait" -}}
{{- $directories := include "megatron-training.directories" . | fromJson -}}
{{- if and .Values.checkpoint.import.enabled (eq $directories.load $directories.import) -}}
{{- $claim := include "megatron-training.outputClaim" . | fromYaml -}}
{{- $program := "import os, sys, time\nminutes, *paths = sys.argv[1:]\ntrackers = [os.path.join(path, 'latest_checkpointed_iteration.txt') for path in paths]\nprint(f'waiting up to {minutes} minutes for the import in {paths[0]}', flush=True)\nend = time.monotonic() + 60 * float(minutes)\nwhile not any(map(os.path.exists, trackers)):\n    if time.monotonic() > end:\n        sys.exit(print(f'the import in {paths[0]} has not finished after {minutes} minutes'))\n    time.sleep(5)" -}}
- name: wait-for-import
  image: {{ include "tokenmill.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3]
  args:
    - -c
    - {{ include "tokenmill.argument" $program }}
    - {{ toJson .Values.checkpoint.import.waitMinutes | quote }}
    - {{ include "tokenmill.argument" (include "megatron-training.outputPath" (list . "load")) }}
    - {{ include "tokenmill.argument" (include "megatron-training.outputPath" (list . "checkpoints")) }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - name: {{ $claim.name }}
      mountPath: {{ $claim.mountPath | quote }}
      {{- with $claim.subPath }}
      subPath: {{ . | quote }}
      {{- end }}
      readOnly: true
{{- end }}
{{- end }}

{{/*
Check the values of the import and of the export. `tokenmill checkpoint` checks the model, and `tokenmill train` compares it
with the run's. Input: $. Output: nothing, or fails.
  {{ include "megatron-training.validateCheckpoint" . }}
*/}}
{{- define "megatron-training.validateCheckpoint" -}}
{{- $import := .Values.checkpoint.import -}}
{{- $directories := include "megatron-training.directories" . | fromJson -}}
{{- if and $import.enabled (not $import.source) }}
{{- fail "\ncheckpoint.import.enabled=true needs checkpoint.import.source: the model to start with.\nAdd --set checkpoint.import.source=hf://ORG/MODEL, or the path of a directory in the pods." }}
{{- end }}
{{- if and $import.revision (not (hasPrefix "hf://" ($import.source | default ""))) }}
{{- fail (printf "\ncheckpoint.import.revision=%v selects a revision on the Hub, but checkpoint.import.source=%s is not on the Hub.\nRemove one of them." $import.revision ($import.source | default "null")) }}
{{- end }}
{{- range list "import" "export" }}
{{- if and (get $.Values.checkpoint .).enabled (eq (get $directories .) $directories.checkpoints) }}
{{- fail (printf "\ncheckpoint.%s.path=%s is also the directory of the run's checkpoints.\nSet another checkpoint.%s.path, or remove it." . $directories.checkpoints .) }}
{{- end }}
{{- end }}
{{- end }}
