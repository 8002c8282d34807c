{{/*
Return the spec of a JobSet with one Indexed Job, `node`. Its pods RELEASE-node-0-N-xxxxx have the label
jobset.sigs.k8s.io/jobset-name=RELEASE. All pods start and fail together: the loss of one pod, an eviction too, fails the
Job, and JobSet recreates all pods when the last of them is gone. An exit code below 128 fails the run, as with a
PyTorchJob. Input: dict "root" $, "run", "empty" (runs nothing). Output: YAML of its spec.
  {{ include "megatron-training.jobset" (dict "root" . "run" "" "empty" false) }}
*/}}
{{- define "megatron-training.jobset" -}}
{{- $job := .root.Values.job -}}
{{- if .empty }}
suspend: true
{{- else if not (kindIs "invalid" $job.ttlSecondsAfterFinished) }}
ttlSecondsAfterFinished: {{ toJson $job.ttlSecondsAfterFinished }}
{{- end }}
{{ include "megatron-training.jobsetSpec" (merge (dict "replicatedLabels" dict) .) }}
{{- end }}

{{/*
Return the part of the spec that JobSet and TrainJob share. The name of the pods' domain contains the run: the headless
service selects pods by the name of the JobSet, and must not resolve the new run's node 0 to a pod of the old run that is
still terminating. JobSet itself sets the name of a group, which the schema of Trainer 2.0 lacks.
Input: the same dict, and "replicatedLabels" of the Job, for a TrainJob. Output: YAML.
  {{ include "megatron-training.jobsetSpec" (merge (dict "replicatedLabels" dict) .) }}
*/}}
{{- define "megatron-training.jobsetSpec" -}}
{{- $release := .root.Release.Name -}}
{{- $domain := printf "%s-%s" $release (.run | default "run" | trunc 8) -}}
{{- $address := printf "- {name: MASTER_ADDR, value: %s-node-0-0.%s}\n- {name: MASTER_PORT, value: \"29500\"}" $release $domain -}}
{{- $nodes := toJson .root.Values.training.nodes -}}
network:
  {{- if .empty }}
  enableDNSHostnames: false
  {{- else }}
  enableDNSHostnames: true
  publishNotReadyAddresses: true
  subdomain: {{ $domain | quote }}
  {{- end }}
successPolicy: {operator: All}
failurePolicy:
  maxRestarts: {{ toJson .root.Values.job.maxRestarts }}
  restartStrategy: BlockingRecreate
  rules:
    - {name: permanent, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}
replicatedJobs:
  - name: node
    {{- if not .replicatedLabels }}
    groupName: default
    {{- end }}
    replicas: 1
    template:
      {{- with .replicatedLabels }}
      metadata:
        labels: {{- toYaml . | nindent 10 }}
      {{- end }}
      spec:
        completionMode: Indexed
        completions: {{ $nodes }}
        parallelism: {{ $nodes }}
        backoffLimit: 0
        podReplacementPolicy: Failed
        podFailurePolicy:
          rules:
            - action: FailJob
              onExitCodes: {containerName: node, operator: In, values: {{ untilStep 1 128 1 | toJson }}}
        template: {{- include "megatron-training.podTemplate" (dict "root" .root "run" .run "container" "node" "environment" $address) | nindent 10 }}
{{- end }}
