{{- /*
Helpers with a component take a list: the root context, the component (operator, redis, redis-users or history) and,
where they need them, the component's values.
*/ -}}

{{/* Beginning of all names. */}}
{{- define "das-rollout.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if .Values.nameOverride -}}
{{- printf "%s-%s" .Release.Name .Values.nameOverride -}}
{{- else -}}
{{- .Release.Name -}}
{{- end -}}
{{- end }}

{{- define "das-rollout.name" -}}
{{- printf "%s-operator" (include "das-rollout.fullname" .) | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "das-rollout.redis" -}}
{{- printf "%s-redis" (include "das-rollout.fullname" .) | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "das-rollout.history" -}}
{{- printf "%s-history" (include "das-rollout.fullname" .) | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select the pods of a component. They cannot be changed in an upgrade. */}}
{{- define "das-rollout.selector" -}}
app.kubernetes.io/name: das-rollout-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* Labels of all objects of a component. */}}
{{- define "das-rollout.labels" -}}
{{- $root := index . 0 -}}
{{- $labels := include "das-rollout.selector" . | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/part-of" $root.Chart.Name -}}
{{- $_ := set $labels "app.kubernetes.io/version" $root.Chart.AppVersion -}}
{{- $_ := set $labels "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) -}}
{{- toYaml (merge $labels $root.Values.commonLabels) -}}
{{- end }}

{{/* Labels and annotations of the pods of a component. Without the versions, so that an upgrade restarts only changed pods. */}}
{{- define "das-rollout.podMetadata" -}}
{{- $values := index . 2 -}}
labels: {{- toYaml (merge (include "das-rollout.selector" . | fromYaml) $values.podLabels (index . 0).Values.commonLabels) | nindent 2 }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
Security, pull secrets and scheduling of the pods of a component. Several replicas are spread over nodes as far as
possible. The security context is that of the restricted Pod Security Standard.
*/}}
{{- define "das-rollout.podSpec" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else if gt (int $values.replicas) 1 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "das-rollout.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{/* Image and security of the containers of a component. */}}
{{- define "das-rollout.container" -}}
{{- $root := index . 0 -}}
image: {{ (index . 2).image | default $root.Values.image.operator }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment variables that the containers with the operator's image need, and those of the values. */}}
{{- define "das-rollout.env" -}}
- {name: USER, value: rollout}
- {name: HOME, value: /tmp}
{{- with (index . 2).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Environment variable with the token for /status and /metrics, for the processes that serve or read them. */}}
{{- define "das-rollout.statusToken" -}}
{{- with .Values.statusToken.existingSecret }}
- name: ROLLOUT_STATUS_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.statusToken.key }}}}
{{- end }}
{{- end }}

{{- define "das-rollout.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with (index . 2).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "das-rollout.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- with (index . 2).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where the CA of Redis is mounted; empty if there is none. */}}
{{- define "das-rollout.caFile" -}}
{{- if or .Values.redis.ca.secret .Values.redis.ca.configMap -}}/etc/redis-ca/ca.crt{{- end -}}
{{- end }}

{{- define "das-rollout.caVolume" -}}
name: redis-ca
{{- if and .Values.redis.ca.secret .Values.redis.ca.configMap }}
{{- fail "set either redis.ca.secret or redis.ca.configMap" }}
{{- else if .Values.redis.ca.secret }}
secret:
  secretName: {{ .Values.redis.ca.secret }}
{{- else }}
configMap:
  name: {{ .Values.redis.ca.configMap }}
{{- end }}
  items: [{key: {{ .Values.redis.ca.key }}, path: ca.crt}]
{{- end }}

{{/* Name of the Secret with the administrator's URL and password of Redis. */}}
{{- define "das-rollout.adminSecret" -}}
{{- .Values.redis.adminSecret.name | default (printf "%s-admin" (include "das-rollout.redis" .)) -}}
{{- end }}

{{/* Whether rollout-redis-users runs: it needs the administrator's URL. */}}
{{- define "das-rollout.createsUsers" -}}
{{- if and .Values.redisUsers.enabled (or .Values.redis.bundled .Values.redis.adminSecret.name) -}}true{{- end -}}
{{- end }}

{{/* Whether rollout-redis-users creates the user and the Secret of the history service. */}}
{{- define "das-rollout.createsHistoryUser" -}}
{{- if and .Values.history.enabled (not .Values.history.redis.existingSecret) -}}
{{- include "das-rollout.createsUsers" . -}}
{{- end -}}
{{- end }}

{{/* Name of the Secret with the URL of the history service's Redis; empty if no service runs. */}}
{{- define "das-rollout.historySecret" -}}
{{- if and .Values.history.enabled .Values.history.redis.existingSecret -}}
{{- .Values.history.redis.existingSecret -}}
{{- else if include "das-rollout.createsHistoryUser" . -}}
{{- printf "%s-history-service" (include "das-rollout.redis" .) -}}
{{- end -}}
{{- end }}

{{/* Egress rules for Redis: the bundled server, and that of the values. */}}
{{- define "das-rollout.redisEgress" -}}
{{- if .Values.redis.bundled }}
- to:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .Release.Namespace }}}}
      podSelector:
        matchLabels: {{- include "das-rollout.selector" (list . "redis") | nindent 10 }}
  ports: [{port: 6379, protocol: TCP}]
{{- else if and (not .Values.networkPolicies.egress.redis) (or (include "das-rollout.createsUsers" .) (include "das-rollout.historySecret" .)) }}
{{- fail "networkPolicies.egress.redis must have a rule for your Redis server" }}
{{- end }}
{{- with .Values.networkPolicies.egress.redis }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Egress rules of the pods of jobs, in addition to their own namespace, as a list in JSON. */}}
{{- define "das-rollout.jobEgress" -}}
{{- $egress := .Values.networkPolicies.egress -}}
{{- concat $egress.dns (include "das-rollout.redisEgress" . | fromYamlArray) $egress.jobs | toJson -}}
{{- end }}

{{/* Arguments that limit a process to the namespaces of the values. */}}
{{- define "das-rollout.namespaceArguments" -}}
{{- if and .Values.operator.namespaces .Values.operator.namespaceSelector }}
{{- fail "set either operator.namespaces or operator.namespaceSelector" }}
{{- end }}
{{- range .Values.operator.namespaces }}
- --namespace={{ . }}
{{- end }}
{{- if .Values.operator.namespaceSelector }}
{{- $labels := list }}
{{- range $name, $value := .Values.operator.namespaceSelector }}
{{- $labels = append $labels (printf "%s=%s" $name $value) }}
{{- end }}
- --namespace-selector={{ join "," $labels }}
{{- end }}
{{- end }}

{{/* Permission to find the namespaces of a selector. */}}
{{- define "das-rollout.namespaceRule" -}}
{{- if .Values.operator.namespaceSelector }}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
{{- end }}
{{- end }}

{{/* Permissions of the operator in the namespaces of jobs. A test compares them with the requests that it makes. */}}
{{- define "das-rollout.rules" -}}
- apiGroups: [das.rollout.dev]
  resources: [rolloutjobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [das.rollout.dev]
  resources: [clusterrolloutruntimes, rolloutruntimes]
  verbs: [list, watch]
- apiGroups: [das.rollout.dev]
  resources: [rolloutjobs/status]
  verbs: [patch]
- apiGroups: [das.rollout.dev]
  resources: [rolloutjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [delete]
- apiGroups: [scheduling.x-k8s.io, scheduling.volcano.sh, scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch]
{{- end }}
