{{- define "fastgen.name" -}}
{{- if contains "fastgen" .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-fastgen-operator" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /*
The name of objects outside the release's namespace, where releases of other namespaces have theirs. A namespace has no
dot, so no two pairs of namespace and release have the same.
*/ -}}
{{- define "fastgen.clusterName" -}}
{{- .Release.Namespace }}.{{ include "fastgen.name" . }}
{{- end -}}

{{- /* The PriorityClass of placeholder pods; empty for none. */ -}}
{{- define "fastgen.headroomClass" -}}
{{- if .Values.headroom.enabled -}}
{{- .Values.headroom.priorityClassName | default (printf "%s-headroom" (include "fastgen.clusterName" .)) -}}
{{- end -}}
{{- end -}}

{{- define "fastgen.dashboards" -}}
{{- $own := has .Values.dashboards.namespace (list "" .Release.Namespace) -}}
{{- ternary (include "fastgen.name" .) (include "fastgen.clusterName" .) $own }}-dashboards
{{- end -}}

{{- /* Operators of different classes do not wait for each other, also during an upgrade that changes the class. */ -}}
{{- define "fastgen.lease" -}}
{{- include "fastgen.name" . }}{{ with .Values.operatorClass }}-{{ . }}{{ end -}}
{{- end -}}

{{- define "fastgen.selector" -}}
app.kubernetes.io/name: fastgen-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "fastgen.labels" -}}
{{ include "fastgen.selector" . }}
app.kubernetes.io/version: {{ include "fastgen.labelValue" .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ include "fastgen.labelValue" (printf "%s-%s" .Chart.Name .Chart.Version) | quote }}
{{- end -}}

{{- /* A version as a label's value: Flux appends build metadata to versions, and a label has no +. */ -}}
{{- define "fastgen.labelValue" -}}
{{- . | replace "+" "_" | trunc 63 | trimAll "-_." -}}
{{- end -}}

{{- /* All labels, and those of a value. Labels of selectors cannot be overridden. */ -}}
{{- define "fastgen.labelsAnd" -}}
{{- $own := include "fastgen.labels" .root | fromYaml -}}
{{- $fixed := include "fastgen.selector" .root | fromYaml -}}
{{- mergeOverwrite $own (deepCopy .more) $fixed | toYaml -}}
{{- end -}}

{{- /* Names and labels of the gateway. A Service's name begins with a letter. */ -}}
{{- define "fastgen.gateway" -}}
{{- $full := ternary .Release.Name (printf "%s-fastgen" .Release.Name) (contains "fastgen" .Release.Name) -}}
{{- $name := printf "%s-gateway" ($full | trunc 47 | trimSuffix "-") -}}
{{- regexMatch "^[a-z]" $name | ternary $name (printf "fastgen-%s" $name) -}}
{{- end -}}

{{- define "fastgen.gatewaySelector" -}}
app.kubernetes.io/name: fastgen-gateway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "fastgen.gatewayLabels" -}}
{{- mergeOverwrite (include "fastgen.labels" . | fromYaml) (include "fastgen.gatewaySelector" . | fromYaml) | toYaml -}}
{{- end -}}

{{- /* What the gateway reads. tests/chart checks that these are the requests of its code. */ -}}
{{- define "fastgen.gatewayRules" -}}
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments]
  verbs: [list, watch]
# The replicas' addresses.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end -}}

{{- define "fastgen.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "fastgen.name" .) -}}
{{- end -}}

{{- /* RBAC rules of the operator. tests/chart checks that they match the operator's requests exactly. */ -}}
{{- define "fastgen.rules" -}}
# Only read by the operator.
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments]
  verbs: [get, list, watch]
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments/status]
  verbs: [patch]
# Required for blockOwnerDeletion by the admission plugin OwnerReferencesPermissionEnforcement.
- apiGroups: [fastgen.dev]
  resources: [fastgendeployments/finalizers]
  verbs: [update]
# Children. Server-side apply needs patch and create. Children that a spec no longer needs are deleted.
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
# Optional kinds. They are not watched, because their CRDs can be missing.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, create, patch, delete]
{{- if .Values.gateway.enabled }}
# The way from InferencePools to the gateway's picker.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, create, patch, delete]
{{- end }}
# The model cache's volume and download Job.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# To find the pods of the current template and their state.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  # patch: to set the pod deletion cost before a scale-down. delete: to replace pods that wait
  # for the node of a volume, and pods whose GPU failed.
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  # patch: to update the count of a repeated Event. list: to find out why a pod has no containers,
  # or a Job no pod.
  verbs: [list, create, patch]
{{- end -}}

{{- /* An image with the registry in front of it. */ -}}
{{- define "fastgen.image" -}}
{{- if .registry }}{{ trimSuffix "/" .registry }}/{{ end }}{{ .image -}}
{{- end -}}

{{- /* The fields of the first map, replaced by those of the second, also by false, which Helm's merge ignores. */ -}}
{{- define "fastgen.replaced" -}}
{{- $fields := deepCopy (index . 0) -}}
{{- range $name, $value := index . 1 -}}
{{- $_ := set $fields $name $value -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{- /* Parts of every pod of the chart. */ -}}
{{- define "fastgen.podSecurityContext" -}}
{{- $user := ternary (dict "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532) dict .Values.podSecurity.fixedUser -}}
{{- $restricted := merge (dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault")) $user -}}
{{- include "fastgen.replaced" (list $restricted .Values.operator.podSecurityContext) -}}
{{- end -}}

{{- define "fastgen.containerSecurityContext" -}}
{{- $confined := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $_ := set $confined "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "fastgen.replaced" (list $confined .Values.operator.securityContext) -}}
{{- end -}}

{{- define "fastgen.pullSecrets" -}}
{{- with .Values.operator.imagePullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- /* Annotations of what `helm test` creates, in the order of the weights. */ -}}
{{- define "fastgen.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- /* Peers for the engines' NetworkPolicies. */ -}}
{{- define "fastgen.neighbours" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "fastgen.selector" . | fromYaml) -}}
{{- $gateway := dict "matchLabels" (include "fastgen.gatewaySelector" . | fromYaml) -}}
{{- $network := .Values.engine.networkPolicy -}}
{{- dict
  "operator" (list (dict "namespaceSelector" $namespace "podSelector" $pods))
  "gateway" (ternary (list (dict "namespaceSelector" $namespace "podSelector" $gateway)) list .Values.gateway.enabled)
  "prometheus" .Values.monitoring.prometheus
  "dns" $network.dns
  "dnsPorts" $network.dnsPorts
  "modelSources" $network.modelSources
  | toJson -}}
{{- end -}}

{{- /* A list of strings as CEL. */ -}}
{{- define "fastgen.celList" -}}
{{- if . }}['{{ join "', '" . }}']{{ else }}[]{{ end -}}
{{- end -}}

{{- /* CEL, whether a securityContext named `context` sets only these fields, and neither user nor group 0. */ -}}
{{- define "fastgen.celContext" -}}
context.all(field, field in {{ include "fastgen.celList" . }}) && ['runAsUser', 'runAsGroup', 'fsGroup'].all(id, !(id in context) || type(context[id]) == int && context[id] > 0) && (!('runAsNonRoot' in context) || context.runAsNonRoot == true) && (!('supplementalGroups' in context) || type(context.supplementalGroups) == list && context.supplementalGroups.all(group, type(group) == int && group > 0))
{{- end -}}

{{- /* CEL, the end of a message about a field that only users who may create pods may set. */ -}}
{{- define "fastgen.needsPods" -}}
': ' + request.userInfo.username + ' may not set this without the right to create pods in the namespace: remove it, or ask a user with that right to apply the resource'
{{- end -}}

{{- /* CEL, the message about Secrets in a field of spec.podTemplate.spec. */ -}}
{{- define "fastgen.needsSecrets" -}}
{{- printf "'spec.podTemplate.spec.%s: must not name a Secret, because ' + request.userInfo.username + ' may neither create pods nor get the Secrets of the namespace: remove it, or ask a user with either right to apply the resource'" . | quote -}}
{{- end -}}

{{- /* The namespaces of a policy's binding. */ -}}
{{- define "fastgen.watched" -}}
{{- with .Values.watchNamespaces -}}
matchResources:
  namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{- toYaml . | nindent 10 }}
{{- end -}}
{{- end -}}
