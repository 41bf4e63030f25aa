"""One namespace of a test cluster: apply, get, and wait for conditions of FastGenDeployments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config

from fastgen_operator import kinds
from fastgen_operator.kinds import Kind
from fastgen_operator.kube.transport import ApiServer
from fastgen_operator.metrics import Metrics
from support.waiting import eventually

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
NAMESPACE = Kind("", "v1", "Namespace", "namespaces")
SECRET = Kind("", "v1", "Secret", "secrets")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
ENDPOINT_SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
QUOTA = Kind("", "v1", "ResourceQuota", "resourcequotas")
SHORT_NAMES = {
    "fgd": kinds.FASTGEN, "pvc": kinds.CLAIM, "pdb": kinds.POD_DISRUPTION_BUDGET, "quota": QUOTA,
}  # fmt: skip
# By the names that kubectl accepts.
KINDS = SHORT_NAMES | {
    name: kind
    for kind in (*vars(kinds).values(), SECRET, CONFIG_MAP, ENDPOINT_SLICE)
    if isinstance(kind, Kind)
    for name in (kind.plural, kind.name.lower(), f"{kind.plural}.{kind.group}")
}


def kind_named(name: str) -> Kind:
    """Return the kind by a name that kubectl accepts, in any case. Raises KeyError."""
    return KINDS[name.lower()]


class Cluster(Protocol):
    """A cluster that kubectl can reach."""

    @property
    def kubeconfig(self) -> Path: ...

    def kubectl(self, *args: str, stdin: str | None = None) -> str: ...


ClusterT = TypeVar("ClusterT", bound=Cluster)


@dataclass
class Namespace(Generic[ClusterT]):
    """One namespace. Waits for a condition take at most `PATIENCE * patience` seconds and poll `every` seconds.

    Reads and patches are single requests, because tests poll and a kubectl process takes 0.1 s of processor time.
    Kinds have the names that kubectl accepts.
    """

    patience: ClassVar[float] = 20
    every: ClassVar[float] = 0.1

    cluster: ClusterT
    name: str

    @cached_property
    def server(self) -> ApiServer:
        """The API server as the user of the cluster's kubeconfig."""
        configuration = Configuration()
        load_kube_config(str(self.cluster.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        return ApiServer(ApiClient(configuration), Metrics(), 60)

    def create(self) -> None:
        """Create the namespace. It admits only pods of the restricted Pod Security standard."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        body = {"metadata": {"name": self.name, "labels": labels}}
        self.server.request("POST", NAMESPACE.path(None), body=body, content_type="application/json")

    def delete(self) -> None:
        """Begin to delete the namespace. Its objects take their time to go; the next test need not wait for them."""
        self.server.request("DELETE", NAMESPACE.path(None, self.name), body={}, content_type="application/json")

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, stdin=stdin)

    def apply(self, obj: Object, *args: str) -> str:
        return self.kubectl("apply", *args, "--filename", "-", stdin=json.dumps(obj))

    def patch(self, what: str, body: Object, subresource: str | None = None) -> None:
        """Merge `body` into the object KIND/NAME. Raises KubeError."""
        kind, _, name = what.partition("/")
        path = kind_named(kind).path(self.name, name, subresource)
        self.server.request("PATCH", path, body=body, content_type=MERGE)

    def get(self, kind: str, name: str) -> Object:
        """Return an object. Raises KubeError, whose text says "not found" if it does not exist."""
        found: Object = self.server.request("GET", kind_named(kind).path(self.name, name))
        return found

    def items(self, names: str, *, labels: str = "", fields: str = "") -> list[Object]:
        """Return the objects of one kind, or of several separated by commas, that match both selectors."""
        query = [("labelSelector", labels), ("fieldSelector", fields)]
        return [
            {"kind": kind.name, **item}
            for kind in map(kind_named, names.split(","))
            for item in self.server.request("GET", kind.path(self.name), query)["items"]
        ]

    def pods(self, name: str = "chat") -> list[Object]:
        """Return the resource's pods that are not being deleted."""
        pods = self.items("pods", labels=f"fastgen.dev/deployment={name}")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def condition(self, kind: str, name: str = "chat") -> Object:
        """Return the condition if it was observed for the current generation, or {}."""
        obj = self.get("fgd", name)
        for condition in obj.get("status", {}).get("conditions", []):
            if condition["type"] == kind and condition["observedGeneration"] == obj["metadata"]["generation"]:
                found: Object = condition
                return found
        return {}

    def wait_condition(self, kind: str, status: str, reason: str | None = None, name: str = "chat") -> Object:
        """Wait until the condition has this status, and this reason if given, and return it."""

        def matching() -> Object:
            condition = self.condition(kind, name)
            if condition.get("status") != status or reason not in (None, condition.get("reason")):
                phases = {pod["metadata"]["name"]: pod.get("status", {}).get("phase") for pod in self.pods(name)}
                raise LookupError(condition, phases)  # shown in the message of the timeout
            return condition

        what = f"{kind}={status}" + (f"/{reason}" if reason else "") + f" of {name}"
        return eventually(matching, within=self.patience, what=what, every=self.every)
