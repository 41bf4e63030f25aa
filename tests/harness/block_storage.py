"""Two nodes, the real scheduler, and volumes that the real attach/detach controller attaches to nodes.

Only the ends are simulated: `Nodes.act` does what the kubelets and the CSI driver's attacher would do. A pod of a node
runs when its volumes are attached there. The attach/detach controller attaches a ReadWriteOnce volume to one node at a
time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

from cluster import flags
from cluster.controlplane import ControlPlane, wait_until_healthy
from cluster.processes import Processes
from fastgen_operator.kinds import Kind
from fastgen_operator.kube.transport import KubeError
from harness.adverse import NODE
from harness.space import NOW, Space
from support.namespace import MERGE, Object
from support.waiting import eventually

VOLUME = Kind("", "v1", "PersistentVolume", "persistentvolumes")
ATTACHMENT = Kind("storage.k8s.io", "v1", "VolumeAttachment", "volumeattachments")
# Pods of other tests, whose namespaces are being deleted, must not take the GPUs.
TAINT = "fastgen.test/storage"
TOLERATION: Object = {"key": TAINT, "operator": "Exists"}
_HOST = "kubernetes.io/hostname"
_ATTACHED_BY_CONTROLLER = "volumes.kubernetes.io/controller-managed-attach-detach"
# The node controller gives up on a node after 50 seconds without a heartbeat.
_HEARTBEAT_SECONDS = 5.0
T = TypeVar("T")


@contextlib.contextmanager
def scheduler(plane: ControlPlane) -> Iterator[None]:
    """Run the real scheduler."""
    processes = Processes(plane.folder)
    kubeconfig = plane.kubeconfig_for("scheduler", "system:kube-scheduler")
    processes.start("kube-scheduler", flags.scheduler(plane.site, kubeconfig))
    try:
        wait_until_healthy(processes, "kube-scheduler", plane.site.scheduler, "/healthz")
        yield
    finally:
        processes.stop("kube-scheduler", patience=3)


@contextlib.contextmanager
def gpu_nodes(space: Space, *names: str, gpus: int) -> Iterator[Nodes]:
    """Create nodes with so many GPUs each, for pods with TOLERATION."""
    has = {"cpu": "8", "memory": "32Gi", "pods": "20", "nvidia.com/gpu": str(gpus)}
    for name in names:
        labels = {_HOST: name, "kubernetes.io/os": "linux"}
        metadata = {"name": name, "labels": labels, "annotations": {_ATTACHED_BY_CONTROLLER: "true"}}
        status = {"capacity": has, "allocatable": has, "conditions": [_ready()]}
        taint = {"key": TAINT, "effect": "NoSchedule"}
        node = {"metadata": metadata, "spec": {"taints": [taint]}, "status": status}
        space.server.request("POST", NODE.path(None), body=node, content_type="application/json")
    try:
        yield Nodes(space, names)
    finally:
        for name in names:
            space.server.request("DELETE", NODE.path(None, name), body={}, content_type="application/json")


@contextlib.contextmanager
def volume(space: Space, access_mode: str, claim: str = "chat") -> Iterator[str]:
    """Create a volume for the claim, in a storage class of its own, and return the name of both."""
    name = f"{space.name}-{claim}"
    spec = {
        **{"capacity": {"storage": "1Gi"}, "accessModes": [access_mode], "storageClassName": name},
        **{"claimRef": {"namespace": space.name, "name": claim}, "persistentVolumeReclaimPolicy": "Retain"},
        "csi": {"driver": "block.fastgen.test", "volumeHandle": name},
    }
    body = {"metadata": {"name": name}, "spec": spec}
    space.server.request("POST", VOLUME.path(None), body=body, content_type="application/json")
    try:
        yield name
    finally:
        space.cluster.kubectl("delete", "pv", name, "--wait=false")


@contextlib.contextmanager
def local_volumes(space: Space, nodes: Nodes) -> Iterator[str]:
    """Create a volume on each node, and return their storage class: a claim gets the one on its first pod's node."""
    name = f"{space.name}-local"
    storage = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name}}
    storage |= {"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"}
    objects = [storage, *(_local_volume(name, node) for node in nodes.names)]
    space.cluster.kubectl(
        "apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )
    nodes.attaches = False
    try:
        yield name
    finally:
        volumes = [obj["metadata"]["name"] for obj in objects[1:]]
        space.cluster.kubectl("delete", "pv", *volumes, "--wait=false")
        space.cluster.kubectl("delete", "storageclass", name)


def _local_volume(storage_class: str, node: str) -> Object:
    only = {"key": _HOST, "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{storage_class}-{node}"},
        "spec": {
            **{"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": storage_class},
            **{"local": {"path": "/nowhere"}, "persistentVolumeReclaimPolicy": "Retain"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [only]}]}},
        },
    }


@dataclass
class Nodes:
    """The nodes as seen from one namespace, and what their kubelets and the CSI attacher do."""

    space: Space
    names: tuple[str, ...]
    # Whether volumes are attached to nodes; local ones are not.
    attaches: bool = True
    _beat: float = field(default_factory=monotonic)

    def until(self, poll: Callable[[], T], *, what: str, within: float = 40) -> T:
        """Let the nodes act until `poll` returns a truthy value, and return that."""

        def acted() -> T:
            self.act()
            return poll()

        try:
            return eventually(acted, within=within, what=what, every=0.1)
        except TimeoutError as error:
            pods = [_summary(pod) for pod in self.space.items("pods")]
            places = [(each["metadata"]["name"], each["spec"], each.get("status")) for each in self._attachments()]
            raise TimeoutError(f"{error}; pods: {pods}; VolumeAttachments: {places}") from error

    def act(self) -> None:
        """Attach volumes, start pods whose volumes are attached, and end terminating pods."""
        self._send_heartbeats()
        attached = self._attach()
        for pod in self.space.items("pods"):
            # Whatever changed since it was listed is seen by the next call.
            with contextlib.suppress(KubeError):
                self._act_on(pod, attached)

    def bound(self, name: str = "chat") -> dict[str, str]:
        """Return the node of each pod of the resource that has one, terminating or not."""
        pods = self.space.items("pods", labels=f"fastgen.dev/deployment={name}")
        return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}

    def attached(self, volume: str) -> set[str]:
        """Return the nodes that the volume is attached to."""
        return {each["spec"]["nodeName"] for each in self._attachments(volume)}

    def cordon(self, name: str) -> None:
        """Keep new pods from the node."""
        self._patch(NODE.path(None, name), {"spec": {"unschedulable": True}})

    def evict(self, pod: str) -> None:
        """Evict the pod as `kubectl drain` does. Raises KubeError if the PodDisruptionBudget forbids it."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self.space.name}/pods/{pod}/eviction"
        self.space.server.request("POST", path, body=body, content_type="application/json")

    def _act_on(self, pod: Object, attached: set[tuple[str, str]]) -> None:
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node not in self.names:
            return
        if pod["metadata"].get("deletionTimestamp"):
            self.space.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
            return
        if pod["status"]["phase"] != "Pending" or not self._has_volumes(pod, node, attached):
            return
        if pod["spec"]["restartPolicy"] == "Always":
            self.space.set_pod(pod, ready=True)
            return
        ended = {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": NOW}
        container = {"name": "fetch", "image": "engine:test", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
        self.space.patch(f"pod/{name}", {"status": status}, "status")

    def _has_volumes(self, pod: Object, node: str, attached: set[tuple[str, str]]) -> bool:
        if not self.attaches:
            return True
        volumes = pod["spec"].get("volumes", ())
        claims = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
        return all((f"{self.space.name}-{claim['claimName']}", node) in attached for claim in claims)

    def _attach(self) -> set[tuple[str, str]]:
        """Carry out the VolumeAttachments, and return the attached volumes with their nodes."""
        for each in self._attachments():
            if not each.get("status", {}).get("attached"):
                path = ATTACHMENT.path(None, each["metadata"]["name"], "status")
                self._patch(path, {"status": {"attached": True}})
        return {
            (each["spec"]["source"]["persistentVolumeName"], each["spec"]["nodeName"]) for each in self._attachments()
        }

    def _attachments(self, volume: str | None = None) -> list[Object]:
        items: list[Object] = self.space.server.request("GET", ATTACHMENT.path(None))["items"]
        return [each for each in items if volume in (None, each["spec"]["source"].get("persistentVolumeName"))]

    def _send_heartbeats(self) -> None:
        if monotonic() - self._beat < _HEARTBEAT_SECONDS:
            return
        self._beat = monotonic()
        for name in self.names:
            path, strategic = NODE.path(None, name, "status"), "application/strategic-merge-patch+json"
            body = {"status": {"conditions": [_ready()]}}
            self.space.server.request("PATCH", path, body=body, content_type=strategic)

    def _patch(self, path: str, body: Object) -> Any:
        return self.space.server.request("PATCH", path, body=body, content_type=MERGE)


def _summary(pod: Object) -> Object:
    conditions = [each for each in pod["status"].get("conditions", ()) if each["status"] != "True"]
    deleted = pod["metadata"].get("deletionTimestamp")
    return {"name": pod["metadata"]["name"], "node": pod["spec"].get("nodeName"), "deleted": deleted, "is": conditions}


def _ready() -> Object:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "Ready", "status": "True", "reason": "Test", "lastHeartbeatTime": now, "lastTransitionTime": NOW}
