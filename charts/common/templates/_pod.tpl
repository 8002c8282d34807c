{{/*
Labels of a stage's pods. Input: the stage's dict; "component" where it is not the stage. Output: YAML.
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
The pod of a stage: fits the restricted Pod Security Standard, holds no service-account token, writes only to its
volumes. Input: the stage's dict, and "arguments" (a YAML list) and "environment" (a YAML list, may be empty).
Output: YAML of a pod's spec.
  spec: {{ include "tokenmill.podSpec" (merge (dict "arguments" $list "environment" "") .) | nindent 2 }}
*/}}
{{- define "tokenmill.podSpec" -}}
{{- $values := .root.Values -}}
{{- $storage := $values.storage -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
# The command is then not process 1, to which the kernel delivers no SIGTERM before a handler is there.
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ toJson $values.job.terminationGracePeriodSeconds }}
{{- with include "tokenmill.serviceAccountName" .root }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- range $key := list "imagePullSecrets" "priorityClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $values $key }}
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
  - name: {{ .stage }}
    image: {{ include "tokenmill.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args: {{- .arguments | nindent 6 }}
    terminationMessagePolicy: FallbackToLogsOnError
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    resources: {{- toYaml $values.resources | nindent 6 }}
    {{- with $values.environment.configMap }}
    envFrom:
      - configMapRef: {name: {{ . | quote }}, optional: true}
    {{- end }}
    env:
      {{- $more := list }}{{ range $values.extraEnv }}{{ $more = append $more .name }}{{ end }}
      {{- range $name, $value := dict "HOME" "/scratch" "HF_HOME" "/scratch/huggingface" "TMPDIR" "/scratch" }}
      {{- if not (has $name $more) }}
      - {name: {{ $name }}, value: {{ $value }}}
      {{- end }}
      {{- end }}
      {{- with .environment }}{{ . | nindent 6 }}{{ end }}
      {{- with $values.hub.tokenSecret }}
      {{- if .name }}
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
      - name: data
        mountPath: {{ $storage.mountPath | quote }}
        {{- with $storage.subPath }}
        subPath: {{ . | quote }}
        {{- end }}
        {{- if $storage.outputPvcName }}
        readOnly: true
      - name: output
        mountPath: {{ $storage.outputMountPath | quote }}
        {{- with $storage.outputSubPath }}
        subPath: {{ . | quote }}
        {{- end }}
        {{- end }}
      {{- if $values.environment.caBundle.configMap }}
      - {name: ca, mountPath: /etc/tokenmill, readOnly: true}
      {{- end }}
      {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes:
  - name: scratch
    emptyDir: {sizeLimit: {{ $values.scratch.sizeLimit | quote }}}
  - name: data
    persistentVolumeClaim: {claimName: {{ $storage.pvcName | quote }}}
  {{- with $storage.outputPvcName }}
  - name: output
    persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- end }}
  {{- with $values.environment.caBundle.configMap }}
  - name: ca
    configMap: {name: {{ . | quote }}}
  {{- end }}
  {{- with $values.extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
