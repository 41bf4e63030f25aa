"""The kinds that the operator reads or writes, and its labels and annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

GROUP: Final = "fastgen.dev"
VERSION: Final = "v1alpha1"

# Maps a child to its FastGenDeployment: pods are selected and watches filtered by this label.
OWNER_LABEL: Final = f"{GROUP}/deployment"
# Suffix of the label's value on download pods, so that no selector of serving pods matches them. Resource names contain
# no underscore.
FETCH_SUFFIX: Final = "_fetch"
# Hash of the manifest last applied to a child and, for a Deployment, of its pod template: see `plan/changes.py`.
APPLIED_ANNOTATION: Final = f"{GROUP}/applied"
# The model's folder in its volume: the folder that pods read, or that a download Job fills.
MODEL_ANNOTATION: Final = f"{GROUP}/model"
# The uid of the claim that a Job fills: a recreated claim of the same name is empty.
CLAIM_ANNOTATION: Final = f"{GROUP}/claim"
# On a Job that the operator ended because another container kept its pod running: the download is complete.
DOWNLOADED_ANNOTATION: Final = f"{GROUP}/downloaded"
# On a claim: its uid and the folder of the model downloaded to it last, so that nothing depends on a finished Job.
CACHED_ANNOTATION: Final = f"{GROUP}/cached"
# On a Job: a hash of its download, independent of the nodes that it may run on.
FETCH_ANNOTATION: Final = f"{GROUP}/fetch"
# The Kueue queue of a workload.
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
FIELD_MANAGER: Final = "fastgen-operator"

# An API object, as decoded JSON.
Object = dict[str, Any]
# A FastGenDeployment's namespace and name.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: `name` as in `kind:`, `plural` as in URLs; `group` is empty for the core group."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        """The `apiVersion:` field, for example `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of an object; without `name`, of a list; without `namespace`, of all namespaces."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


FASTGEN: Final = Kind(GROUP, VERSION, "FastGenDeployment", "fastgendeployments")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
REPLICA_SET: Final = Kind("apps", "v1", "ReplicaSet", "replicasets")
SERVICE: Final = Kind("", "v1", "Service", "services")
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
POD_DISRUPTION_BUDGET: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
CLAIM: Final = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
JOB: Final = Kind("batch", "v1", "Job", "jobs")
POD: Final = Kind("", "v1", "Pod", "pods")
NODE: Final = Kind("", "v1", "Node", "nodes")
EVENT: Final = Kind("", "v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")

# Kinds of other projects. Their CRDs may be missing, and installed or removed at any time.
POD_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
INFERENCE_POOL: Final = Kind("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools")
OPTIONAL_KINDS: Final = (POD_MONITOR, INFERENCE_POOL)
