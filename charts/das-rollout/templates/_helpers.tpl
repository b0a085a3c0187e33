{{- define "das-rollout.name" -}}
{{- printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "das-rollout.labels" -}}
app.kubernetes.io/name: das-rollout-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "das-rollout.selector" -}}
app.kubernetes.io/name: das-rollout-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "das-rollout.redis" -}}
{{- printf "%s-redis" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "das-rollout.history" -}}
{{- printf "%s-history" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "das-rollout.historySelector" -}}
app.kubernetes.io/name: das-rollout-history
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Whether the bundled Redis needs a user for the history service, because the service uses this server. */}}
{{- define "das-rollout.historyUser" -}}
{{- if and .Values.history.enabled .Values.redis.bundled (not .Values.history.redis.existingSecret) -}}true{{- end -}}
{{- end }}

{{/* Name of the Secret with the URL of the history service's Redis; empty if no service runs. */}}
{{- define "das-rollout.historySecret" -}}
{{- if .Values.history.enabled -}}
{{- if .Values.history.redis.existingSecret -}}
{{- .Values.history.redis.existingSecret -}}
{{- else if .Values.redis.bundled -}}
{{- printf "%s-history" (include "das-rollout.redis" .) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Access rules of this user: rollout_api.protocol.access_rules.service_rules(), quoted for a shell. */}}
{{- define "das-rollout.historyRules" -}}
resetkeys '~history:*' resetchannels +@all -@admin -@dangerous -function '-script|flush' '-script|kill' +info -scan -randomkey clearselectors
{{- end }}

{{/* Security context of every pod of this chart, for the restricted Pod Security Standard. */}}
{{- define "das-rollout.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "das-rollout.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Permissions of the operator in the namespaces of jobs. A test compares them with the requests that it makes. */}}
{{- define "das-rollout.rules" -}}
- apiGroups: [das.rollout.dev]
  resources: [rolloutjobs]
  verbs: [list, watch, patch, delete]
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
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [delete]
{{- end }}
