{{/*
Return the name of TensorBoard's service. Input: $. Output: a name.
  {{ include "megatron-training.tensorboardName" . }}
*/}}
{{- define "megatron-training.tensorboardName" -}}
{{- if ne .Release.Name "megatron-training" }}{{ .Release.Name }}-{{ end }}tensorboard
{{- end }}

{{/*
Return whether the chart starts TensorBoard: it reads the events from a volume, not from a bucket. Input: $. Output: true or
false.
  {{ include "megatron-training.hasTensorboard" . }}
*/}}
{{- define "megatron-training.hasTensorboard" -}}
{{ and .Values.tensorboard.enabled (not (contains "://" (include "megatron-training.outputPath" (list . "logs")))) }}
{{- end }}

{{/*
Return TensorBoard for the run's events, its service, and the pod of `helm test`. Input: $. Output: documents, or nothing.
  {{ include "megatron-training.tensorboard" . }}
*/}}
{{- define "megatron-training.tensorboard" -}}
{{- if eq (include "megatron-training.hasTensorboard" .) "true" }}
{{- $name := include "megatron-training.tensorboardName" . }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
spec:
  replicas: 1
  revisionHistoryLimit: 1
  selector:
    matchLabels:
      {{- include "tokenmill.selectorLabels" . | nindent 6 }}
      app.kubernetes.io/component: tensorboard
  template: {{- include "megatron-training.tensorboardPod" (dict "root" . "restartPolicy" "Always") | nindent 4 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name | quote }}
  labels: {{- include "tokenmill.labels" . | nindent 4 }}
spec:
  # Headless: the name resolves to the only pod, and kubectl port-forward uses it too.
  clusterIP: None
  selector:
    {{- include "tokenmill.selectorLabels" . | nindent 4 }}
    app.kubernetes.io/component: tensorboard
  ports:
    - {name: http, port: 6006, targetPort: http}
{{- include "megatron-training.test" . }}
{{- end }}
{{- end }}

{{/*
Return TensorBoard's pod template. Input: dict "root" $, "restartPolicy". Output: YAML.
  template: {{ include "megatron-training.tensorboardPod" (dict "root" . "restartPolicy" "Always") | nindent 4 }}
*/}}
{{- define "megatron-training.tensorboardPod" -}}
{{- $tensorboard := .root.Values.tensorboard -}}
{{- $claims := list (merge (dict "readOnly" true) (include "megatron-training.outputClaim" .root | fromYaml)) -}}
{{- $pod := merge (dict "stage" "tensorboard" "environment" "" "claims" $claims "resources" $tensorboard.resources
      "image" $tensorboard.image "graceSeconds" 5 "command" "- tensorboard"
      "arguments" (printf "- --logdir\n- %s\n- --bind_all\n- --port=6006" (include "tokenmill.argument" (include "megatron-training.outputPath" (list .root "logs"))))
      "containerFields" "ports: [{name: http, containerPort: 6006}]\nreadinessProbe:\n  httpGet: {path: /, port: http}\n  periodSeconds: 5"
      "placement" (pick $tensorboard "nodeSelector" "tolerations")) . -}}
metadata:
  labels: {{- include "tokenmill.podLabels" $pod | nindent 4 }}
  {{- with .root.Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec: {{- include "tokenmill.podSpec" $pod | nindent 2 }}
{{- end }}

{{/*
Return the pod of `helm test`, which connects to TensorBoard through its service. Input: $. Output: a document.
  {{ include "megatron-training.test" . }}
*/}}
{{- define "megatron-training.test" -}}
{{- $tensorboard := .Values.tensorboard -}}
{{- $url := printf "http://%s:6006/data/environment" (include "megatron-training.tensorboardName" .) -}}
{{- $program := "import sys, time, urllib.request\nfor attempt in range(30):\n    try:\n        answer = urllib.request.urlopen(sys.argv[1], timeout=5).read()\n        sys.exit(print(sys.argv[1], answer.decode()))\n    except OSError as problem:\n        print(problem, flush=True)\n        time.sleep(2)\nsys.exit(f'no answer from {sys.argv[1]}')" -}}
{{- $pod := dict "root" . "stage" "test" "environment" "" "resources" $tensorboard.resources "image" $tensorboard.image
      "claims" (include "megatron-training.claims" . | fromYamlArray) "graceSeconds" 5
      "command" "- python3" "arguments" (printf "- -c\n- %s\n- %s" (toJson $program) $url)
      "placement" (pick $tensorboard "nodeSelector" "tolerations") }}
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ .Release.Name }}-test
  labels: {{- include "tokenmill.podLabels" $pod | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec: {{- include "tokenmill.podSpec" $pod | nindent 2 }}
{{- end }}
