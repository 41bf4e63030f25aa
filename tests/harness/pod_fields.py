"""Every field of a pod's spec by what the policy on authors makes of it in spec.podTemplate.

A field is Allowed with any value, Checked (with a value that is accepted and one that is not) or Refused.
`Schema.patch` returns the patch of a pod's spec that sets one field of a schema of the API server's OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from support.namespace import Object


@dataclass(frozen=True)
class Allowed:
    """A harmless field."""

    value: Any


@dataclass(frozen=True)
class Checked:
    """A field with a value that is accepted, and one that needs rights."""

    accepted: Any
    rejected: Any


@dataclass(frozen=True)
class Refused:
    """A field that needs the right to create pods."""

    value: Any


Verdict = Allowed | Checked | Refused


@dataclass(frozen=True)
class Schema:
    """The verdicts on the fields of a schema, and where it stands in a pod's spec."""

    fields: Mapping[str, Verdict]
    patch: Callable[[Object], Object]


def of_engine(fields: Object) -> Object:
    return {"containers": [{"name": "engine", **fields}]}


def of_volume(fields: Object) -> Object:
    return {"volumes": [{"name": "v", **fields}]}


def refused(*names: str) -> dict[str, Verdict]:
    return {name: Refused({}) for name in names}


_ONE: Final = [{"name": "v"}]
_USER: Final = Checked(7, 0)
_TRUE: Final = Checked(True, False)
_FALSE: Final = Checked(False, True)
_PROBE: Final = Checked({"periodSeconds": 5}, {"httpGet": {"host": "10.0.0.1", "port": 80}})
_SECRET: Final = {"name": "other", "key": "k"}

SCHEMAS: Final[Mapping[str, Schema]] = {
    "PodSpec": Schema(
        {
            "affinity": Allowed({"nodeAffinity": {}}),
            "nodeSelector": Allowed({"a": "b"}),
            "tolerations": Allowed([{"operator": "Exists"}]),
            "topologySpreadConstraints": Allowed([{"topologyKey": "zone", "maxSkew": 1}]),
            "schedulerName": Allowed("other"),
            "schedulingGates": Allowed(_ONE),
            "dnsPolicy": Allowed("Default"),
            "dnsConfig": Allowed({"nameservers": ["10.0.0.1"]}),
            "hostAliases": Allowed([{"ip": "10.0.0.1", "hostnames": ["a"]}]),
            "enableServiceLinks": Allowed(True),
            "resources": Allowed({"limits": {"cpu": 1}}),
            "volumes": Checked([{"name": "v", "emptyDir": {}}], [{"name": "v", "hostPath": {"path": "/"}}]),
            "containers": Checked([{"name": "engine"}], [{"name": "mine", "image": "mine:1"}]),
            "initContainers": Checked([{"name": "fetch"}], [{"name": "mine", "image": "mine:1"}]),
            "imagePullSecrets": Checked([], [{"name": "other"}]),
            "automountServiceAccountToken": _FALSE,
            "hostNetwork": _FALSE,
            "hostPID": _FALSE,
            "hostIPC": _FALSE,
            "hostUsers": _FALSE,
            "priorityClassName": Checked(None, "system-node-critical"),
            "runtimeClassName": Checked(None, "unconfined"),
            "securityContext": Checked({"runAsUser": 7}, {"runAsUser": 0}),
            "serviceAccountName": Checked("chat", "admin"),
            "serviceAccount": Checked("chat", "admin"),
            "activeDeadlineSeconds": Refused(1),
            "hostname": Refused("a"),
            "hostnameOverride": Refused("a"),
            "nodeName": Refused("n"),
            "preemptionPolicy": Refused("PreemptLowerPriority"),
            "priority": Refused(2_000_001_000),
            "restartPolicy": Refused("Never"),
            "setHostnameAsFQDN": Refused(True),
            "shareProcessNamespace": Refused(True),
            "subdomain": Refused("a"),
            "terminationGracePeriodSeconds": Refused(2**40),
            **refused("ephemeralContainers", "os", "overhead", "readinessGates"),
            "resourceClaims": Refused([{"name": "devices", "resourceClaimName": "other"}]),
        },
        lambda fields: fields,
    ),
    "Container": Schema(
        {
            "name": Checked("engine", "mine"),
            "env": Checked([{"name": "A", "value": "b"}], [{"name": "A", "valueFrom": {"secretKeyRef": _SECRET}}]),
            "envFrom": Checked([{"configMapRef": {"name": "c"}}], [{"secretRef": {"name": "other"}}]),
            "imagePullPolicy": Allowed("Always"),
            "ports": Checked([{"containerPort": 9}], [{"containerPort": 9, "hostPort": 9}]),
            "resources": Allowed({"limits": {"cpu": 1}}),
            "securityContext": Checked({"readOnlyRootFilesystem": False}, {"privileged": True}),
            "volumeMounts": Checked(
                [{"name": "v", "mountPath": "/v"}],
                [{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}],
            ),
            "livenessProbe": _PROBE,
            "readinessProbe": _PROBE,
            "startupProbe": _PROBE,
            "image": Refused("mine:1"),
            "terminationMessagePath": Refused("/dev/termination"),
            "terminationMessagePolicy": Refused("File"),
            "workingDir": Refused("/"),
            **refused("args", "command", "lifecycle", "resizePolicy", "restartPolicy", "restartPolicyRules"),
            **refused("stdin", "stdinOnce", "tty", "volumeDevices"),
        },
        of_engine,
    ),
    "PodSecurityContext": Schema(
        {
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "supplementalGroups": Checked([7], [7, 0]),
            "runAsNonRoot": _TRUE,
            "fsGroupChangePolicy": Allowed("OnRootMismatch"),
            "supplementalGroupsPolicy": Allowed("Strict"),
            **refused("appArmorProfile", "seLinuxChangePolicy", "seLinuxOptions", "seccompProfile", "sysctls"),
            **refused("windowsOptions"),
        },
        lambda fields: {"securityContext": fields},
    ),
    "SecurityContext": Schema(
        {
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "runAsNonRoot": _TRUE,
            "readOnlyRootFilesystem": Allowed(False),
            "allowPrivilegeEscalation": Refused(True),
            "privileged": Refused(True),
            **refused("appArmorProfile", "capabilities", "procMount", "seLinuxOptions", "seccompProfile"),
            **refused("windowsOptions"),
        },
        lambda fields: of_engine({"securityContext": fields}),
    ),
    "Volume": Schema(
        {
            "name": Allowed("v"),
            "emptyDir": Allowed({}),
            "configMap": Allowed({"name": "c"}),
            "downwardAPI": Allowed({}),
            "projected": Checked({"sources": [{"configMap": {}}]}, {"sources": [{"serviceAccountToken": {}}]}),
            "secret": Checked(None, {"secretName": "other"}),
            "persistentVolumeClaim": Checked({"readOnly": True}, {"claimName": "other"}),
            "ephemeral": Refused({"volumeClaimTemplate": {"spec": {"dataSource": {"name": "other"}}}}),
            "hostPath": Refused({"path": "/"}),
            "csi": Refused({"driver": "secrets-store.csi.k8s.io"}),
            "nfs": Refused({"server": "10.0.0.1", "path": "/"}),
            **refused(
                "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flexVolume", "flocker"
            ),
            **refused("gcePersistentDisk", "gitRepo", "glusterfs", "image", "iscsi", "photonPersistentDisk"),
            **refused("portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
        },
        of_volume,
    ),
    "ProjectedVolumeSource": Schema(
        {"defaultMode": Allowed(0o400), "sources": Checked([], [{"serviceAccountToken": {}}])},
        lambda fields: of_volume({"projected": fields}),
    ),
    "VolumeProjection": Schema(
        {
            "configMap": Allowed({"name": "c"}),
            "downwardAPI": Allowed({}),
            "secret": Refused({"name": "other"}),
            **refused("clusterTrustBundle", "podCertificate", "serviceAccountToken"),
        },
        lambda fields: of_volume({"projected": {"sources": [fields]}}),
    ),
    "PersistentVolumeClaimVolumeSource": Schema(
        {"claimName": Refused("other"), "readOnly": Allowed(True)},
        lambda fields: of_volume({"persistentVolumeClaim": fields}),
    ),
    "EnvVar": Schema(
        {"name": Allowed("A"), "value": Allowed("b"), "valueFrom": Checked({"fieldRef": {}}, {"secretKeyRef": {}})},
        lambda fields: of_engine({"env": [{"name": "A", **fields}]}),
    ),
    "EnvVarSource": Schema(
        {
            "configMapKeyRef": Allowed({"name": "c", "key": "k"}),
            "fieldRef": Allowed({"fieldPath": "status.hostIP"}),
            "resourceFieldRef": Allowed({"resource": "limits.cpu"}),
            "secretKeyRef": Refused(_SECRET),
            "fileKeyRef": Refused({"volumeName": "v", "path": "p", "key": "k"}),
        },
        lambda fields: of_engine({"env": [{"name": "A", "valueFrom": fields}]}),
    ),
    "EnvFromSource": Schema(
        {"prefix": Allowed("A_"), "configMapRef": Allowed({"name": "c"}), "secretRef": Refused({"name": "other"})},
        lambda fields: of_engine({"envFrom": [fields]}),
    ),
    "ContainerPort": Schema(
        {
            "name": Allowed("p"),
            "containerPort": Allowed(9),
            "protocol": Allowed("TCP"),
            "hostIP": Refused("0.0.0.0"),
            "hostPort": Refused(9),
        },
        lambda fields: of_engine({"ports": [{"containerPort": 9, **fields}]}),
    ),
    "VolumeMount": Schema(
        {
            "name": Allowed("v"),
            "mountPath": Allowed("/v"),
            "readOnly": Allowed(True),
            "subPath": Allowed("s"),
            "mountPropagation": Refused("Bidirectional"),
            "recursiveReadOnly": Refused("Enabled"),
            "subPathExpr": Refused("$(A)"),
        },
        lambda fields: of_engine({"volumeMounts": [{"name": "v", "mountPath": "/v", **fields}]}),
    ),
    "Probe": Schema(
        {
            **{name: Allowed(5) for name in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds")},
            **{name: Allowed(5) for name in ("successThreshold", "failureThreshold")},
            **refused("exec", "grpc", "httpGet", "tcpSocket"),
            "terminationGracePeriodSeconds": Refused(2**40),
        },
        lambda fields: of_engine({"livenessProbe": fields}),
    ),
}

# What is below Allowed fields: a new field of these needs a decision too.
BELOW: Final[Mapping[str, str]] = {
    "Affinity": "nodeAffinity podAffinity podAntiAffinity",
    "ConfigMapEnvSource": "name optional",
    "ConfigMapKeySelector": "key name optional",
    "ConfigMapProjection": "items name optional",
    "ConfigMapVolumeSource": "defaultMode items name optional",
    "DownwardAPIProjection": "items",
    "DownwardAPIVolumeFile": "fieldRef mode path resourceFieldRef",
    "DownwardAPIVolumeSource": "defaultMode items",
    "EmptyDirVolumeSource": "medium sizeLimit",
    "HostAlias": "hostnames ip",
    "KeyToPath": "key mode path",
    "LabelSelector": "matchExpressions matchLabels",
    "LabelSelectorRequirement": "key operator values",
    "NodeAffinity": "preferredDuringSchedulingIgnoredDuringExecution requiredDuringSchedulingIgnoredDuringExecution",
    "NodeSelector": "nodeSelectorTerms",
    "NodeSelectorRequirement": "key operator values",
    "NodeSelectorTerm": "matchExpressions matchFields",
    "ObjectFieldSelector": "apiVersion fieldPath",
    "PodAffinity": "preferredDuringSchedulingIgnoredDuringExecution requiredDuringSchedulingIgnoredDuringExecution",
    "PodAffinityTerm": "labelSelector matchLabelKeys mismatchLabelKeys namespaceSelector namespaces topologyKey",
    "PodAntiAffinity": "preferredDuringSchedulingIgnoredDuringExecution requiredDuringSchedulingIgnoredDuringExecution",
    "PodDNSConfig": "nameservers options searches",
    "PodDNSConfigOption": "name value",
    "PodSchedulingGate": "name",
    "PreferredSchedulingTerm": "preference weight",
    "Quantity": "",
    "ResourceClaim": "name request",
    "ResourceFieldSelector": "containerName divisor resource",
    "ResourceRequirements": "claims limits requests",
    "Toleration": "effect key operator tolerationSeconds value",
    "TopologySpreadConstraint": "labelSelector matchLabelKeys maxSkew minDomains nodeAffinityPolicy nodeTaintsPolicy "
    "topologyKey whenUnsatisfiable",
    "WeightedPodAffinityTerm": "podAffinityTerm weight",
}
