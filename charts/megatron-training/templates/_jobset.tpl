{{/*
A JobSet of one Indexed Job, `node`: pods RELEASE-node-0-N-xxxxx, found by jobset.sigs.k8s.io/jobset-name=RELEASE. A gang
starts and fails as one: whatever takes one pod, an eviction too, fails the Job, and all pods are made again once the last
of them is gone; what ends with less than 128 fails the run, as with a PyTorchJob.
Input: dict "root" $, "run", "empty" (runs nothing). Output: YAML of its spec.
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
What JobSet and TrainJob have in common. The pods' domain has the run in its name: the headless service finds pods by the
name of the JobSet, and those of an old run, while they end, must not be found in the place of the new one's node 0.
Input: the same dict, and "replicatedLabels", of the Job. Output: YAML.
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
    groupName: default
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
