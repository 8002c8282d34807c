{{/*
Return the pod template of a training pod. Input: dict "root" $, "container", "environment" (YAML of the variables that the
engine does not set), "run" (see megatron-training.run), "restartPolicy" unless it is Never, and "overrides" of the placement,
as `master`.
Output: YAML of a pod template: metadata and spec.
  template: {{ include "megatron-training.podTemplate" (dict "root" . "container" "pytorch" ...) | nindent 4 }}
*/}}
{{- define "megatron-training.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $placement := pick $values "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" -}}
{{- $_ := set $placement "schedulerName" ($values.gang.schedulerName | default $values.schedulerName) -}}
{{- $_ := set $placement "tolerations" (include "megatron-training.tolerations" .root | fromJsonArray) -}}
{{- range $key, $value := .overrides }}{{ if not (kindIs "invalid" $value) }}{{ $_ := set $placement $key $value }}{{ end }}{{ end -}}
{{- $pod := merge (dict "stage" "train"
      "arguments" (printf "- train\n- %s" (include "megatron-training.settingsPath" .root))
      "environment" (printf "%s%s%s" (include "megatron-training.environment" .) (include "tokenmill.metricsEnvironment" .root) (include "megatron-training.notifyEnvironment" .root))
      "containerFields" (include "tokenmill.metricsPorts" .root)
      "overridden" (keys ($values.environmentVariables | default dict))
      "claims" (include "megatron-training.claims" .root | fromYamlArray)
      "resources" (include "megatron-training.resources" .root | fromJson)
      "mounts" (printf "%s%s" (include "megatron-training.mounts" .root) (include "tokenmill.notifyMounts" .root))
      "volumes" (printf "%s%s" (include "megatron-training.volumes" .root) (include "tokenmill.notifyVolumes" .root))
      "capabilities" (ternary (list "IPC_LOCK") list $values.network.ipcLock)
      "hostNetwork" $values.network.hostNetwork
      "placement" $placement) . -}}
metadata:
  labels:
    {{- include "tokenmill.podLabels" $pod | nindent 4 }}
    {{- with .labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with include "tokenmill.podAnnotations" .root }}
  annotations: {{- . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tokenmill.podSpec" $pod | nindent 2 }}
  {{- with include "megatron-training.importWait" .root }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
{{- end }}

{{/*
Return the tolerations of the training pods: those of the values, and one for the taint of nodes with GPUs, whose key is by
convention the name of the resource that the pods request. Input: $. Output: a JSON list.
  {{ $tolerations := include "megatron-training.tolerations" . | fromJsonArray }}
*/}}
{{- define "megatron-training.tolerations" -}}
{{- $tolerations := .Values.tolerations | default list -}}
{{- $resource := .Values.gpu.resource | default "" -}}
{{- $tolerated := empty $resource -}}
{{- range $tolerations }}{{ if has (.key | default "") (list "" $resource) }}{{ $tolerated = true }}{{ end }}{{ end -}}
{{- if not $tolerated }}{{ $tolerations = append $tolerations (dict "key" $resource "operator" "Exists" "effect" "NoSchedule") }}{{ end -}}
{{ toJson $tolerations }}
{{- end }}

{{/*
Return the variables for the announcements of a training pod. Input: $. Output: a YAML list, or nothing.
  {{ include "megatron-training.notifyEnvironment" . }}
*/}}
{{- define "megatron-training.notifyEnvironment" -}}
{{- $engine := include "megatron-training.engine" .Values.engine | fromYaml -}}
{{- include "tokenmill.notifyEnvironment" (dict "root" . "kind" (printf "%s/%s" $engine.apiVersion $engine.kind) "name" .Release.Name) }}
{{- end }}

{{/*
Return the path of the settings file in the pods. Input: $. Output: a path.
  - {{ include "megatron-training.settingsPath" . }}
*/}}
{{- define "megatron-training.settingsPath" -}}
/etc/tokenmill-training/settings.json
{{- end }}

{{/*
Return the environment of a training pod. The command needs, for every engine: TOKENMILL_NODES; the node's rank in
TOKENMILL_NODE_RANK, RANK (training operator) or JOB_COMPLETION_INDEX (Jobs, so JobSet and TrainJob); and node 0 in
MASTER_ADDR and MASTER_PORT. Input: the dict of megatron-training.podTemplate. Output: a YAML list.
  {{ include "megatron-training.environment" (dict "root" . "run" "" "environment" "") }}
*/}}
{{- define "megatron-training.environment" -}}
- {name: TOKENMILL_NODES, value: {{ toJson .root.Values.training.nodes | quote }}}
- {name: TOKENMILL_RUN, value: {{ .run | quote }}}
{{- if eq .root.Values.engine "pytorchjob" }}
- {name: TOKENMILL_RUN_FILE, value: /etc/tokenmill-run/run}
{{- end }}
{{- with .environment }}
{{ . }}
{{- end }}
{{- $extraNames := list }}{{ range .root.Values.extraEnv }}{{ $extraNames = append $extraNames .name }}{{ end }}
{{- /* PyTorch reads the user's name, for which the image may lack an entry. */}}
{{- range $name, $value := merge (dict) (.root.Values.environmentVariables | default dict) (dict "USER" "tokenmill") }}
{{- $text := ternary $value (toJson $value) (kindIs "string" $value) }}
{{- include "tokenmill.validateVariable" (dict "key" "environmentVariables" "name" $name "value" $text) }}
{{- if not (has $name $extraNames) }}
- {name: {{ $name | quote }}, value: {{ $text | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/*
Return the claims of a training pod: one claim, one for the data and one for the output, or none if all of them are in
buckets. Input: $. Output: a YAML list.
  {{ $claims := include "megatron-training.claims" . | fromYamlArray }}
*/}}
{{- define "megatron-training.claims" -}}
{{- with .Values.storage -}}
{{- $separate := not (empty .checkpointPvcName) -}}
{{- $claims := list -}}
{{- if .pvcName -}}
{{- $claims = append $claims (dict "name" "data" "claim" .pvcName "mountPath" .mountPath "subPath" .subPath "readOnly" $separate) -}}
{{- end -}}
{{- if $separate -}}
{{- $claims = append $claims (dict "name" "checkpoints" "claim" .checkpointPvcName "mountPath" .checkpointMountPath "subPath" .checkpointSubPath) -}}
{{- end -}}
{{ toYaml $claims }}
{{- end -}}
{{- end }}

{{/*
Return the claim that a run writes to. Input: $. Output: YAML of one claim.
  {{ $claim := include "megatron-training.outputClaim" . | fromYaml }}
*/}}
{{- define "megatron-training.outputClaim" -}}
{{ include "megatron-training.claims" . | fromYamlArray | last | toYaml }}
{{- end }}

{{/*
Return the mounts of a training pod in addition to its claims: the settings, /tmp for programs that ignore TMPDIR, and
/dev/shm, for which the container runtime's default is 64 MiB. Input: $. Output: a YAML list.
  volumeMounts: {{ include "megatron-training.mounts" . | nindent 2 }}
*/}}
{{- define "megatron-training.mounts" -}}
- {name: settings, mountPath: /etc/tokenmill-training, readOnly: true}
- {name: scratch, mountPath: /tmp, subPath: tmp}
{{- if eq .Values.engine "pytorchjob" }}
- {name: run, mountPath: /etc/tokenmill-run, readOnly: true}
{{- end }}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.network.hugepages2Mi }}
- {name: hugepages, mountPath: /dev/hugepages}
{{- end }}
{{- end }}

{{/*
Return the volumes of these mounts, except the scratch volume that every pod has. A rollback deletes the settings of another
run, and its pods that had not started would wait for them forever: without its settings a pod of a PyTorchJob starts, reads
that the release names another run, and ends, so that its operator replaces it. The other engines' objects are immutable, and
a rollback deletes the pods with them or fails. Input: $. Output: a YAML list.
  volumes: {{ include "megatron-training.volumes" . | nindent 2 }}
*/}}
{{- define "megatron-training.volumes" -}}
- name: settings
  {{- if eq .Values.engine "pytorchjob" }}
  configMap: {name: {{ include "megatron-training.settingsName" . | quote }}, optional: true}
- name: run
  configMap: {name: {{ include "megatron-training.runConfigMapName" . | quote }}}
  {{- else }}
  configMap: {name: {{ include "megatron-training.settingsName" . | quote }}}
  {{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmSize | quote }}}
{{- if .Values.network.hugepages2Mi }}
- name: hugepages
  emptyDir: {medium: HugePages-2Mi}
{{- end }}
{{- end }}

{{/*
Return the requests and limits of a training pod: GPUs and network devices, CPUs and memory per GPU, overridden by
`resources`. Devices and huge pages cannot be overcommitted: their requests equal their limits. Input: $. Output: JSON.
  {{ $resources := include "megatron-training.resources" . | fromJson }}
*/}}
{{- define "megatron-training.resources" -}}
{{- $values := .Values -}}
{{- $gpus := int64 $values.training.gpusPerNode -}}
{{- $devices := dict -}}
{{- with $values.gpu.resource }}{{ $_ := set $devices . $gpus }}{{ end -}}
{{- with $values.network.rdma }}{{ if .resource }}{{ $_ := set $devices .resource (int64 .count) }}{{ end }}{{ end -}}
{{- with $values.network.efa }}{{ if .count }}{{ $_ := set $devices .resource (int64 .count) }}{{ end }}{{ end -}}
{{- with $values.network.hugepages2Mi }}{{ $_ := set $devices "hugepages-2Mi" . }}{{ end -}}
{{- $memory := printf "%dGi" (mulf $gpus (float64 $values.gpu.hostMemoryGib) | ceil | int64) -}}
{{- $cpus := printf "%dm" (mulf $gpus (float64 $values.gpu.cpus) 1000 | int64) -}}
{{- $resources := $values.resources | default dict -}}
{{- dict "requests" (merge (dict) ($resources.requests | default dict) $devices (dict "cpu" $cpus "memory" $memory))
         "limits" (merge (dict) ($resources.limits | default dict) $devices (dict "memory" $memory)) | toJson -}}
{{- end }}
