"""A namespace of a bare control plane, in which tests set the status of the pods."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cluster.controlplane import ControlPlane
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.objects.pod import Pod
from support.namespace import Namespace, Object
from support.waiting import eventually

NOW = "2026-01-01T00:00:00Z"


def resource(name: str = "chat", **spec: Any) -> Object:
    """Return a FastGenDeployment; keywords add to its spec or replace parts of it."""
    return {
        "apiVersion": "fastgen.dev/v1alpha1",
        "kind": "FastGenDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"source": "file:///models/tiny.gguf"}, "engine": {"device": "cpu"}, **spec},
    }


def running(*, ready: bool, container: Object | None = None) -> Object:
    """Return the status of a running pod; `container` overrides fields of its container's status."""
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


def downloaded() -> Object:
    """Return the status of a running, ready pod whose init container has downloaded the model."""
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": NOW, "finishedAt": NOW}
    init = {"name": "fetch", "image": "engine:test", "imageID": "", "ready": True, "restartCount": 0}
    return {**running(ready=True), "initContainerStatuses": [{**init, "state": {"terminated": ended}}]}


def is_observed(obj: Object) -> bool:
    """Return whether the object's controller has seen its last change."""
    return bool(obj.get("status", {}).get("observedGeneration") == obj["metadata"]["generation"])


def is_active(pod: Object) -> bool:
    """Return whether a ReplicaSet counts the pod."""
    return "deletionTimestamp" not in pod["metadata"] and not Pod(pod).has_ended


def owner(obj: Object) -> str:
    """Return the name of the object's first owner."""
    owners = obj["metadata"].get("ownerReferences") or [{"name": ""}]
    return str(owners[0]["name"])


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment and its ReplicaSets."""

    deployment: Object
    replica_sets: list[Object]

    @property
    def is_observed(self) -> bool:
        """Whether the controllers have seen the last change of all of them."""
        return all(is_observed(each) for each in [self.deployment, *self.replica_sets])

    def counts(self, *fields: str) -> list[int]:
        """Return numbers of pods from the Deployment's status."""
        return [self.deployment.get("status", {}).get(field, 0) for field in fields]


class Space(Namespace[ControlPlane]):
    """A namespace whose pods have no kubelet."""

    def wait_pods(self, count: int, name: str = "chat", *, replaced: Collection[str] = ()) -> list[Object]:
        """Wait until the resource has `count` pods, none of them with a name in `replaced`, and return them."""

        def poll() -> list[Object] | None:
            pods = self.pods(name)
            names = [pod["metadata"]["name"] for pod in pods]
            return pods if len(names) == count and set(replaced).isdisjoint(names) else None

        pods = eventually(poll, within=20, what=f"{count} pods of {name}", every=0.1)
        assert pods is not None
        return pods

    def set_pod(self, pod: Object, *, ready: bool, container: Object | None = None) -> None:
        """Set a running pod's status, as a kubelet would; `container` overrides fields of its container's status."""
        self.patch(
            f"pod/{pod['metadata']['name']}",
            {"status": running(ready=ready, container=container)},
            "status",
        )

    def set_downloaded(self, pod: Object) -> None:
        """Let the pod have downloaded its model, and be ready."""
        self.patch(f"pod/{pod['metadata']['name']}", {"status": downloaded()}, "status")

    def make_ready(self, name: str = "chat", *, count: int = 1) -> None:
        """Make all pods of the resource ready."""
        for pod in self.wait_pods(count, name):
            self.set_pod(pod, ready=True)

    def finish_rollout(self, name: str = "chat", *, count: int = 1) -> None:
        """Make each pod ready that appears, until the Deployment has `count` pods, all ready and of its last template.

        Unlike `make_ready`, this may begin while pods of an earlier template are still being replaced. It ends when the
        ReplicaSets are observed too: a Deployment's status can be complete while the ReplicaSet of the last template
        has yet to delete its pod and create another, if it was scaled to zero and back in between.
        """

        def poll() -> bool:
            pods = self.pods(name)
            for pod in pods:
                if pod.get("status", {}).get("phase") != "Running":
                    with suppress(KubeError):  # deleted since it was listed
                        self.set_pod(pod, ready=True)
            workload = self._workload(name)
            counts = workload.counts("replicas", "updatedReplicas", "readyReplicas")
            return workload.is_observed and len(pods) == count and counts == [count] * 3

        eventually(poll, within=20, what=f"the end of the rollout of {name}", every=0.1)

    def serve(self, **spec: Any) -> Object:
        """Apply the resource `chat`, make it ready, and return the pod template of its Deployment."""
        self.apply(resource(**spec))
        self.complete()
        return self.template()

    def complete(self) -> None:
        """Make the pods of the resource `chat` ready, and wait until its status shows that nothing is left to do.

        One condition follows from the Deployment's status, the other from the pods: either may be written last.
        """
        self.finish_rollout()
        self.wait_condition("Progressing", "True", "RolloutComplete")
        self.wait_condition("Ready", "True", "AllReplicasReady")

    def template(self) -> Object:
        """Return the pod template of the Deployment `chat`."""
        found: Object = self.get("deployment", "chat")["spec"]["template"]
        return found

    def set_unschedulable(self, pod: Object, message: str) -> None:
        """Set the condition of an unschedulable pod, as the scheduler would."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        status = {"conditions": [{**condition, "lastTransitionTime": NOW}]}
        self.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")

    def versions(self, name: str = "chat") -> dict[str, str]:
        """Return the resource versions of the resource and its children."""
        kinds = ("fgd", "deployment", "service", "serviceaccount", "networkpolicy", "poddisruptionbudget")
        objects = [self.get(kind, name) for kind in kinds]
        return {obj["kind"]: obj["metadata"]["resourceVersion"] for obj in objects}

    def settled(self, name: str = "chat") -> dict[str, str]:
        """Return the resource versions after two equal reads a moment apart, once Kubernetes has counted the pods."""
        seen: list[dict[str, str]] = [{}]

        def poll() -> bool:
            seen.append(self.versions(name))
            return seen[-1] == seen[-2] and self._is_counted(name)

        eventually(poll, within=20, what=f"{name} to settle", every=0.9)
        return seen[-1]

    def _is_counted(self, name: str) -> bool:
        """Return whether the Deployment's status counts its pods as they are: its controller may lag behind."""
        workload = self._workload(name)
        own = {each["metadata"]["name"] for each in workload.replica_sets}
        pods = [pod for pod in self.items("pods") if owner(pod) in own and is_active(pod)]
        counts = workload.counts("replicas", "readyReplicas")
        return workload.is_observed and counts == [len(pods), sum(Pod(pod).is_ready for pod in pods)]

    def _workload(self, name: str) -> Workload:
        deployment = self.get("deployment", name)
        return Workload(deployment, [each for each in self.items("replicasets") if owner(each) == name])
