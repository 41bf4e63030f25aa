"""The kinds of object that the operator reads or writes, and the names it knows them by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

GROUP: Final = "fastgen.dev"
VERSION: Final = "v1alpha1"

# The label that maps a child to its FastGenDeployment: the selector of pods, and the filter of the watches.
OWNER_LABEL: Final = f"{GROUP}/deployment"
# What the label's value ends with on the pods of the model's download, which no selector of serving pods may match. A
# resource's name has no underscore.
FETCH_SUFFIX: Final = "_fetch"
# Hash of what was last applied to a child, so that the steady state is known without a write.
APPLIED_ANNOTATION: Final = f"{GROUP}/applied"
# The folder of a model in its volume: on pods the one they use, on a Job the one it fills.
MODEL_ANNOTATION: Final = f"{GROUP}/model"
# The uid of the volume that a Job fills: another one of the same name is empty.
CLAIM_ANNOTATION: Final = f"{GROUP}/claim"
FIELD_MANAGER: Final = "fastgen-operator"

# An API object as the server gives it.
Object = dict[str, Any]
# A FastGenDeployment's namespace and name.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind: `name` as in `kind:`, `plural` as in its path; `group` is empty for the core group."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        """As in `apiVersion:`, for example `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of one object, or of all where `name` is None; of every namespace where `namespace` is None."""
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
EVENT: Final = Kind("", "v1", "Event", "events")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")

# Kinds of other projects, which a cluster may have or not; their CRDs come and go without the operator.
POD_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
INFERENCE_POOL: Final = Kind("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools")
OPTIONAL_KINDS: Final = (POD_MONITOR, INFERENCE_POOL)
