{{/*
Return the spec of a PyTorchJob, with pods RELEASE-master-0 and RELEASE-worker-N. Its operator sets MASTER_ADDR,
MASTER_PORT, RANK and WORLD_SIZE in their environment. The restart policy ExitCode restarts pods with an exit code of 128
or more, and fails the run for a lower one. The operator ignores a backoffLimit for it, so that the command counts
attempts itself. Input: dict "root" $, "run", "empty" (runs nothing). Output: YAML of its spec.
  {{ include "megatron-training.pytorchjob" (dict "root" . "run" "" "empty" false) }}
*/}}
{{- define "megatron-training.pytorchjob" -}}
{{- $values := .root.Values -}}
{{- $job := $values.job -}}
{{- /* The operator sets the pods' restart policy, and warns about each pod template that specifies one. */}}
{{- $pod := dict "root" .root "run" .run "container" "pytorch" "restartPolicy" "" "labels" (dict "job-name" .root.Release.Name) -}}
{{- $workers := sub (int64 $values.training.nodes) 1 -}}
nprocPerNode: {{ toJson $values.training.gpusPerNode | quote }}
runPolicy:
  cleanPodPolicy: {{ $job.cleanPodPolicy }}
  {{- if .empty }}
  suspend: true
  {{- end }}
  {{- if not (kindIs "invalid" $job.ttlSecondsAfterFinished) }}
  ttlSecondsAfterFinished: {{ toJson $job.ttlSecondsAfterFinished }}
  {{- end }}
  {{- with $values.gang.minAvailable }}
  schedulingPolicy: {minAvailable: {{ toJson . }}}
  {{- end }}
pytorchReplicaSpecs:
  {{- range $type, $replicas := dict "Master" 1 "Worker" $workers }}
  {{- if $replicas }}
  {{ $type }}:
    replicas: {{ $replicas }}
    restartPolicy: ExitCode
    template: {{- include "megatron-training.podTemplate" (merge (dict "overrides" (ternary $values.master dict (eq $type "Master"))) $pod) | nindent 6 }}
  {{- end }}
  {{- end }}
{{- end }}
