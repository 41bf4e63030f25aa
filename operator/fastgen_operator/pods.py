"""Facts read from one pod and its containers: readiness, node, container statuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from fastgen_operator.kinds import QUEUE_LABEL, Object
from fastgen_operator.objects import condition_of, is_terminating, name_of

# Time after the end of a pod's grace period in which its node reports its end.
_OVERDUE: Final = timedelta(seconds=60)
_KUEUE: Final = "kueue.x-k8s.io/"
ENGINE_CONTAINER: Final = "engine"
# Reasons of a waiting container whose image the kubelet cannot pull.
IMAGE_PULL_REASONS: Final = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
)

Role = Literal["engine", "container", "sidecar", "init container"]


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod: its spec, and its status, which is empty until the kubelet reports it.

    `grace` is the pod's termination grace period, seconds.
    """

    role: Role
    spec: dict[str, Any]
    status: dict[str, Any]
    grace: int = 30

    @property
    def title(self) -> str:
        """The container as in a message."""
        return "the engine" if self.role == "engine" else f"{self.role} {self.status['name']}"

    @property
    def running(self) -> dict[str, Any] | None:
        """The state of a running container."""
        return self._state("running")

    @property
    def waiting(self) -> dict[str, Any]:
        """The state of a waiting container; empty for others."""
        return self._state("waiting") or {}

    @property
    def terminated(self) -> dict[str, Any] | None:
        """The state of a container that has ended and is not started again."""
        return self._state("terminated")

    @property
    def ended(self) -> dict[str, Any] | None:
        """The last termination, with times; None if there was none."""
        last: dict[str, Any] | None = self.status.get("lastState", {}).get("terminated")
        return self.terminated or last

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return int(self.status.get("restartCount", 0))

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended with exit code 0."""
        return self.terminated is not None and self.terminated.get("exitCode") == 0

    def _state(self, name: str) -> dict[str, Any] | None:
        state: dict[str, Any] | None = self.status.get("state", {}).get(name)
        return state


def containers_of(pod: Object) -> Iterator[Container]:
    """Yield the reported containers, init containers first: while one fails, no later container has started."""
    grace = int(pod.get("spec", {}).get("terminationGracePeriodSeconds", 30))
    for kind in ("initContainer", "container"):
        specs = {spec["name"]: spec for spec in pod.get("spec", {}).get(f"{kind}s", ())}
        for status in pod.get("status", {}).get(f"{kind}Statuses", ()):
            spec = specs.get(status["name"], {})
            yield Container(_role(kind, status["name"], spec), spec, status, grace)


def container_of(pod: Object, name: str) -> Container:
    """Return the container of that name; without a status if the kubelet has not reported it."""
    return next((each for each in containers_of(pod) if each.status["name"] == name), Container("container", {}, {}))


def _role(kind: str, name: str, spec: dict[str, Any]) -> Role:
    if kind == "container":
        return "engine" if name == ENGINE_CONTAINER else "container"
    return "sidecar" if spec.get("restartPolicy") == "Always" else "init container"


def is_ready(pod: Object) -> bool:
    """Return whether the pod passes its readiness probe."""
    return pod_condition(pod, "Ready").get("status") == "True"


def is_starting(pod: Object) -> bool:
    """Return whether the pod is in its first start: no container has started, ended or restarted yet."""
    if has_ended(pod) or pending_message(pod) is not None:
        return False
    containers = pod.get("status", {}).get("containerStatuses", ())
    return not any(
        each.get("started") or each.get("restartCount") or "terminated" in each.get("state", {}) for each in containers
    )


def is_overdue(pod: Object, at: datetime) -> bool:
    """Return whether the pod exists long after the end of its grace period: it has probably lost its node."""
    if not is_terminating(pod):
        return False
    return at - datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) > _OVERDUE


def termination_message(pod: Object, at: datetime) -> str:
    """Say what a terminating pod holds, and, if it is overdue, how to end it."""
    due, place = pod["metadata"]["deletionTimestamp"], f"pod {name_of(pod)} on node {node_of(pod)}"
    if not is_overdue(pod, at):
        return f"{place} still holds its resources: it terminates by {due}"
    return (
        f"{place} should have terminated by {due}: if the node has failed, run kubectl taint node {node_of(pod)} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute to release its pods and volumes"
    )


def is_silent(pod: Object) -> bool:
    """Return whether the node does not respond: the pod's last report was ready, the node controller disagrees."""
    if pod_condition(pod, "ContainersReady").get("status") != "True" or is_ready(pod):
        return False
    return pod_condition(pod, "Ready").get("reason") != "ReadinessGatesNotReady"


def has_ended(pod: Object) -> bool:
    """Return whether the pod never runs again: evicted, rejected by its node, or completed."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_scheduled(pod: Object) -> bool:
    """Return whether the pod is bound to a node."""
    return bool(node_of(pod)) or pod_condition(pod, "PodScheduled").get("status") == "True"


def node_of(pod: Object) -> str:
    """Return the name of the pod's node; empty if it is not bound."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def unschedulable_message(pod: Object) -> str | None:
    """Return the scheduler's message if it found no node, else None."""
    return _unscheduled(pod, "Unschedulable")


def unschedulable_pods(pods: Iterable[Object]) -> tuple[Object, ...]:
    """Return the pods for which the scheduler found no node, without those that are being deleted."""
    return tuple(pod for pod in pods if unschedulable_message(pod) is not None and not is_terminating(pod))


def gate_message(pod: Object) -> str | None:
    """Return which scheduling gate holds the pod back, and the remedy; None if no scheduling gate does."""
    if _unscheduled(pod, "SchedulingGated") is None:
        return None
    gates = [str(gate["name"]) for gate in pod.get("spec", {}).get("schedulingGates", ())]
    message = f"held by the scheduling gate {' and '.join(gates) or 'of another controller'}"
    if any(gate.startswith(_KUEUE) for gate in gates):
        return f"{message}: {queue_message(pod)}"
    return f"{message}: see the controller that added it"


def queue_message(workload: Object) -> str:
    """Say that a pod or Job waits for Kueue."""
    queue = workload["metadata"].get("labels", {}).get(QUEUE_LABEL)
    return f"Kueue has not admitted it to the queue {queue}: see kubectl describe workloads"


def pending_message(pod: Object) -> str | None:
    """Return why the pod has no node and gets none for now (the scheduler's message, or its gates), else None."""
    return unschedulable_message(pod) or gate_message(pod)


def has_started(pod: Object) -> bool:
    """Return whether the engine runs and has passed its startup probe; it may serve even if it is not ready."""
    engine = container_of(pod, ENGINE_CONTAINER)
    return bool(engine.status.get("started")) and engine.running is not None


def pod_condition(pod: Object, kind: str) -> dict[str, Any]:
    """Return the pod's condition of that type; empty if there is none."""
    return condition_of(pod.get("status", {}), kind)


def last_line(terminated: dict[str, Any]) -> str:
    """Return the last non-empty line of a terminated container's message, or an empty string."""
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _unscheduled(pod: Object, reason: str) -> str | None:
    """Return the message of the pod's condition PodScheduled if it is False for that reason, else None."""
    condition = pod_condition(pod, "PodScheduled")
    if condition.get("status") != "False" or condition.get("reason") != reason:
        return None
    return str(condition.get("message", ""))
