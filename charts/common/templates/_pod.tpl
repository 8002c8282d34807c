{{/*
Return the labels of a stage's pods. Input: the stage's dict; "component" if it differs from the stage. Output: YAML.
  labels: {{ include "tokenmill.podLabels" . | nindent 4 }}
*/}}
{{- define "tokenmill.podLabels" -}}
{{ include "tokenmill.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component | default .stage }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
Return the claims that a stage's pods mount: one claim for input and output, one for each, or none if both are in buckets.
Input: the stage's dict. Output: a YAML list of name, claim, mountPath, subPath, readOnly.
  {{ $claims := include "tokenmill.claims" . | fromYamlArray }}
*/}}
{{- define "tokenmill.claims" -}}
{{- $storage := .root.Values.storage -}}
{{- $claims := list -}}
{{- if $storage.pvcName -}}
{{- $claims = append $claims (dict "name" "data" "claim" $storage.pvcName "mountPath" $storage.mountPath "subPath" $storage.subPath "readOnly" (not (empty $storage.outputPvcName))) -}}
{{- end -}}
{{- if $storage.outputPvcName -}}
{{- $claims = append $claims (dict "name" "output" "claim" $storage.outputPvcName "mountPath" $storage.outputMountPath "subPath" $storage.outputSubPath) -}}
{{- end -}}
{{ toYaml $claims }}
{{- end }}

{{/*
Return the spec of a pod that meets the restricted Pod Security Standard, has no service-account token, and writes only
to its volumes.
Input: the stage's dict, with "arguments" (a YAML list) and "environment" (a YAML list, may be empty). Pods other than a
stage's own pass what differs:
  container            name of the container; by default the stage's
  command              a YAML list, instead of the image's entry point
  image, resources, graceSeconds, restartPolicy (empty if the pod's owner sets it), claims (a list, see tokenmill.claims)
  placement            dict of priorityClassName, schedulerName, nodeSelector, tolerations and so on, instead of the values.
                       The label and the tolerations kubernetes.io/arch of the values still apply, unless "image" is set:
                       an image of one architecture starts only on such nodes
  mounts, volumes      YAML lists of more mounts and volumes
  overridden           names of the variables among HOME, HF_HOME and TMPDIR that "environment" sets
  containerFields      YAML of more fields of the container, such as ports and probes
  capabilities         list of capabilities to add
  hostNetwork          true for the node's own network
Output: YAML of a pod's spec.
  spec: {{ include "tokenmill.podSpec" (merge (dict "arguments" $list "environment" "") .) | nindent 2 }}
*/}}
{{- define "tokenmill.podSpec" -}}
{{- $values := .root.Values -}}
{{- $placement := ternary .placement $values (hasKey . "placement") -}}
{{- $architecture := "kubernetes.io/arch" -}}
{{- $nodeSelector := $placement.nodeSelector | default dict -}}
{{- $tolerations := $placement.tolerations | default list -}}
{{- if not .image -}}
{{- with index ($values.nodeSelector | default dict) $architecture -}}
{{- $nodeSelector = merge (dict) $nodeSelector (dict $architecture .) -}}
{{- end -}}
{{- range $values.tolerations -}}
{{- if and (eq (.key | default "") $architecture) (not (has . $tolerations)) }}{{ $tolerations = append $tolerations . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $placement = merge (dict "nodeSelector" $nodeSelector "tolerations" $tolerations) $placement -}}
{{- $claims := .claims -}}
{{- if not $claims }}{{ $claims = include "tokenmill.claims" . | fromYamlArray }}{{ end -}}
{{- $resources := include "tokenmill.resources" (dict "root" .root "resources" (.resources | default $values.resources | default dict)) | fromJson -}}
{{- include "tokenmill.validatePod" (merge (dict "resources" $resources "claims" $claims "priorityClassName" $placement.priorityClassName) .) -}}
{{- with ternary .restartPolicy "Never" (hasKey . "restartPolicy") -}}
restartPolicy: {{ . }}
{{ end -}}
automountServiceAccountToken: false
enableServiceLinks: false
# Without it the command would be process 1, to which the kernel delivers SIGTERM only after a handler is installed.
shareProcessNamespace: true
{{- if .hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
terminationGracePeriodSeconds: {{ toJson (.graceSeconds | default $values.job.terminationGracePeriodSeconds) }}
{{- with include "tokenmill.serviceAccountName" .root }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- range $key := list "imagePullSecrets" "priorityClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index (ternary $values $placement (eq $key "imagePullSecrets")) $key }}
{{ $key }}: {{- if kindIs "string" . }} {{ . | quote }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
  {{- range $key, $value := $values.podSecurityContext }}
  {{- if not (kindIs "invalid" $value) }}
  {{ $key }}: {{ toJson $value }}
  {{- end }}
  {{- end }}
containers:
  - name: {{ .container | default .stage }}
    image: {{ .image | default (include "tokenmill.image" .root) | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    {{- with .command }}
    command: {{- . | nindent 6 }}
    {{- end }}
    args: {{- .arguments | nindent 6 }}
    {{- with .containerFields }}{{ . | nindent 4 }}{{ end }}
    terminationMessagePolicy: FallbackToLogsOnError
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]{{ with .capabilities }}, add: {{ toJson . }}{{ end }}}
    resources: {{- toYaml $resources | nindent 6 }}
    {{- with $values.environment.configMap }}
    envFrom:
      - configMapRef: {name: {{ . | quote }}, optional: {{ include "tokenmill.isOptionalConfigMap" . }}}
    {{- end }}
    env:
      {{- $overridden := .overridden | default list }}{{ range $values.extraEnv }}{{ $overridden = append $overridden .name }}{{ end }}
      {{- range $name, $value := dict "HOME" "/scratch" "HF_HOME" "/scratch/huggingface" "TMPDIR" "/scratch" }}
      {{- if not (has $name $overridden) }}
      - {name: {{ $name }}, value: {{ $value }}}
      {{- end }}
      {{- end }}
      {{- with .environment }}{{ . | nindent 6 }}{{ end }}
      {{- with ($values.hub).tokenSecret }}
      {{- if and .name (ne ($.component | default "") "verify") }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
      {{- end }}
      {{- end }}
      {{- with $values.environment.caBundle }}
      {{- if .configMap }}
      {{- $file := printf "/etc/tokenmill/%s" .key | quote }}
      - {name: SSL_CERT_FILE, value: {{ $file }}}
      - {name: REQUESTS_CA_BUNDLE, value: {{ $file }}}
      - {name: AWS_CA_BUNDLE, value: {{ $file }}}
      {{- end }}
      {{- end }}
      {{- with $values.extraEnv }}{{ toYaml . | nindent 6 }}{{ end }}
    volumeMounts:
      - {name: scratch, mountPath: /scratch}
      {{- range $claims }}
      - name: {{ .name }}
        mountPath: {{ .mountPath | quote }}
        {{- with .subPath }}
        subPath: {{ . | quote }}
        {{- end }}
        {{- if .readOnly }}
        readOnly: true
        {{- end }}
      {{- end }}
      {{- with .mounts }}{{ . | nindent 6 }}{{ end }}
      {{- if $values.environment.caBundle.configMap }}
      - {name: ca, mountPath: /etc/tokenmill, readOnly: true}
      {{- end }}
      {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes:
  - name: scratch
    {{- with $values.scratch.storageClassName }}
    ephemeral:
      volumeClaimTemplate:
        spec:
          accessModes: [ReadWriteOnce]
          storageClassName: {{ . | quote }}
          resources: {requests: {storage: {{ $values.scratch.sizeLimit | quote }}}}
    {{- else }}
    emptyDir: {sizeLimit: {{ $values.scratch.sizeLimit | quote }}}
    {{- end }}
  {{- range $claims }}
  - name: {{ .name }}
    persistentVolumeClaim: {claimName: {{ .claim | quote }}}
  {{- end }}
  {{- with .volumes }}{{ . | nindent 2 }}{{ end }}
  {{- with $values.environment.caBundle.configMap }}
  - name: ca
    configMap: {name: {{ . | quote }}}
  {{- end }}
  {{- with $values.extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/*
Return whether a ConfigMap of variables is optional. Only the default one is: a cluster with direct access to the Hub does
not need it. A name that a user set must exist. Input: its name. Output: true or false.
  optional: {{ include "tokenmill.isOptionalConfigMap" .Values.environment.configMap }}
*/}}
{{- define "tokenmill.isOptionalConfigMap" -}}
{{ eq . "tokenmill-environment" }}
{{- end }}
