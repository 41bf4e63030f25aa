{{- define "fastgen.name" -}}
{{- if contains "fastgen" .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-fastgen-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fastgen.selector" -}}
app.kubernetes.io/name: fastgen-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fastgen.labels" -}}
{{ include "fastgen.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "fastgen.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "fastgen.name" .) -}}
{{- end -}}

{{- /* What the operator does, and nothing else; tests/chart runs it with exactly this. */ -}}
{{- define "fastgen.rules" -}}
# Watched and read; written only by people.
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments]
  verbs: [get, list, watch]
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments/status]
  verbs: [patch]
# Asked for by clusters that check who may set blockOwnerDeletion (the OwnerReferencesPermissionEnforcement admission).
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments/finalizers]
  verbs: [update]
# Children: server-side apply is a patch that may create. What a spec does not ask for any more is deleted.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Only where the cluster has these kinds; not watched, because they come and go.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, create, patch, delete]
# The model's volume and the Job that downloads into it.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# Which pods are of the current template, and how they are.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  # patch: what it costs to delete each of them, before some are.
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  # patch: what an Event tells has happened again.
  verbs: [create, patch]
{{- end -}}

{{- /* Who is who in the cluster's network, for the engines' NetworkPolicies. */ -}}
{{- define "fastgen.neighbours" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "fastgen.selector" . | fromYaml) -}}
{{- $network := .Values.engine.networkPolicy -}}
{{- dict
  "operator" (list (dict "namespaceSelector" $namespace "podSelector" $pods))
  "prometheus" .Values.monitoring.prometheus
  "dns" $network.dns
  "modelSources" $network.modelSources
  | toJson -}}
{{- end -}}
