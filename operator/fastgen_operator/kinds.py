"""The kinds that the operator reads or writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

GROUP: Final = "fastgen.dev"
VERSION: Final = "v1alpha1"

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
ENDPOINT_SLICE: Final = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")

# Kinds of other projects. Their CRDs may be missing, and installed or removed at any time.
POD_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
INFERENCE_POOL: Final = Kind("inference.networking.k8s.io", "v1", "InferencePool", "inferencepools")
OPTIONAL_KINDS: Final = (POD_MONITOR, INFERENCE_POOL)
