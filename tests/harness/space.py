"""A namespace of a control plane without nodes: the test sets the status of the pods."""

from __future__ import annotations

from typing import Any

from cluster.controlplane import ControlPlane
from support.namespace import Namespace, Object
from support.waiting import eventually

NOW = "2026-01-01T00:00:00Z"


def resource(name: str = "chat", **spec: Any) -> Object:
    """A FastGenDeployment; keywords add to its spec, or replace parts of it."""
    return {
        "apiVersion": "fastgen.dev/v1alpha1",
        "kind": "FastGenDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "file:///models/tiny.gguf"}, "engine": {"device": "cpu"}, **spec},
    }


def running(*, ready: bool, container: Object | None = None) -> Object:
    """The status of a pod that has a node and runs; `container` overrides its container's status."""
    conditions = [("PodScheduled", True), ("Initialized", True), ("ContainersReady", ready), ("Ready", ready)]
    return {
        "phase": "Running",
        "conditions": [{"type": kind, "status": str(holds), "lastTransitionTime": NOW} for kind, holds in conditions],
        "containerStatuses": [
            {
                "name": "engine",
                "image": "engine:test",
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "state": {"running": {"startedAt": NOW}},
                **(container or {}),
            }
        ],
    }


class Space(Namespace[ControlPlane]):
    """One namespace."""

    def wait_pods(self, count: int, name: str = "chat") -> list[Object]:
        def look() -> list[Object] | None:
            pods = self.pods(name)
            return pods if len(pods) == count else None

        pods = eventually(look, within=20, what=f"{count} pods of {name}", every=0.1)
        assert pods is not None
        return pods

    def set_pod(self, pod: Object, *, ready: bool, container: Object | None = None) -> None:
        """What a kubelet would report: the pod has a node and runs; `container` overrides its container's status."""
        self.patch(
            f"pod/{pod['metadata']['name']}",
            {"status": running(ready=ready, container=container)},
            "--subresource=status",
        )

    def make_ready(self, name: str = "chat", *, count: int = 1) -> None:
        """All pods of the resource pass their readiness probe."""
        for pod in self.wait_pods(count, name):
            self.set_pod(pod, ready=True)

    def set_unschedulable(self, pod: Object, message: str) -> None:
        """What the scheduler would report."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        status = {"conditions": [{**condition, "lastTransitionTime": NOW}]}
        self.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "--subresource=status")

    def versions(self, name: str = "chat") -> dict[str, str]:
        """The resource versions of the resource and its children."""
        kinds = ("fgd", "deployment", "service", "serviceaccount", "networkpolicy", "poddisruptionbudget")
        objects = [self.get(kind, name) for kind in kinds]
        return {obj["kind"]: obj["metadata"]["resourceVersion"] for obj in objects}

    def settled(self, name: str = "chat") -> dict[str, str]:
        """Return the resource versions after two equal reads a moment apart."""
        seen: list[dict[str, str]] = [{}]

        def look() -> bool:
            seen.append(self.versions(name))
            return seen[-1] == seen[-2]

        eventually(look, within=20, what=f"{name} to settle", every=0.9)
        return seen[-1]
