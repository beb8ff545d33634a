{{- define "jaxserve.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "jaxserve.selector" -}}
app.kubernetes.io/name: jaxserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "jaxserve.labels" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "jaxserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The model and the flags that decide which programs are compiled. */}}
{{- define "jaxserve.engineArgs" -}}
- --cache-dir=/var/cache/jaxserve
{{- with .Values.engineArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "jaxserve.kvEvents" -}}
{{- $name := first .Values.model.servedNames | default .Values.model.name -}}
{{- dict
  "enable_kv_cache_events" true
  "publisher" "zmq"
  "endpoint" (printf "tcp://*:%v" .Values.kvEvents.port)
  "replay_endpoint" (printf "tcp://*:%v" .Values.kvEvents.replayPort)
  "topic" (printf "kv@$(POD_IP):8000@%s" $name) | toJson -}}
{{- end -}}

{{/* Fields of every pod: who it runs as. With fsGroup a new claim is writable by that user; set once
at its root, or kubelet would let the group write programs, which are then refused. */}}
{{- define "jaxserve.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The server's environment: its address for the topic of KV events, its key, what the values say. */}}
{{- define "jaxserve.env" -}}
{{- if .Values.kvEvents.enabled }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- with .Values.apiKey.existingSecret }}
- name: JAXSERVE_API_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.apiKey.key }}}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Fields of every container but its environment. */}}
{{- define "jaxserve.container" -}}
image: {{ include "jaxserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources: {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "jaxserve.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/jaxserve}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "jaxserve.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: state, emptyDir: {}}
{{- with .Values.model.volume }}
- {{- merge (dict "name" "models") . | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "jaxserve.precompile" -}}
name: precompile
{{ include "jaxserve.container" . }}
{{- with .Values.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
args:
  - precompile
  - {{ printf "--model=%s" .Values.model.name | quote }}
  {{- include "jaxserve.engineArgs" . | nindent 2 }}
volumeMounts:
  {{- include "jaxserve.mounts" . | nindent 2 }}
  - {name: programs, mountPath: /var/cache/jaxserve}
{{- end -}}
