"""Facts read from one pod: readiness, node, container statuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

from fastgen_operator.kinds import QUEUE_LABEL, Object

# Time after the end of a pod's grace period in which its node reports its end.
_OVERDUE: Final = timedelta(seconds=60)
_KUEUE: Final = "kueue.x-k8s.io/"
ENGINE_CONTAINER: Final = "engine"
IMAGE_PULL_REASONS: Final = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
)
"""Reasons of a waiting container whose image the kubelet cannot pull."""


def name_of(pod: Object) -> str:
    """Return the pod's name."""
    return str(pod["metadata"]["name"])


def is_ready(pod: Object) -> bool:
    """Return whether the pod passes its readiness probe."""
    condition = pod_condition(pod, "Ready")
    return condition is not None and condition["status"] == "True"


def is_starting(pod: Object) -> bool:
    """Return whether the pod is in its first start: no container has started, ended or restarted yet."""
    status = pod.get("status", {})
    if has_ended(pod) or pending_message(pod) is not None:
        return False
    containers = status.get("containerStatuses", ())
    return not any(
        each.get("started") or each.get("restartCount") or "terminated" in each.get("state", {}) for each in containers
    )


def is_terminating(pod: Object) -> bool:
    """Return whether the pod is being deleted; it may hold its node's GPUs until it is gone."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_overdue(pod: Object, at: datetime | None) -> bool:
    """Return whether the pod still exists long after the end of its grace period.

    It has probably lost its node.
    """
    return is_terminating(pod) and at is not None and at - _deletion_of(pod) > _OVERDUE


def termination_message(pod: Object, at: datetime | None) -> str:
    """Say what a terminating pod holds, and, if it is overdue, how to end it."""
    due, place = pod["metadata"]["deletionTimestamp"], f"pod {name_of(pod)} on node {node_of(pod)}"
    if not is_overdue(pod, at):
        return f"{place} still holds its resources: it terminates by {due}"
    return (
        f"{place} should have terminated by {due}: if the node has failed, run kubectl taint node {node_of(pod)} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute to release its pods and volumes"
    )


def _deletion_of(pod: Object) -> datetime:
    return datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])


def is_silent(pod: Object) -> bool:
    """Return whether the pod's node does not respond.

    The pod's last report was ready, and the node controller disagrees.
    """
    reported, ready = pod_condition(pod, "ContainersReady"), pod_condition(pod, "Ready")
    if reported is None or reported["status"] != "True" or is_ready(pod):
        return False
    return ready is None or ready.get("reason") != "ReadinessGatesNotReady"


def has_ended(pod: Object) -> bool:
    """Return whether the pod never runs again: evicted, rejected by its node, or completed."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_scheduled(pod: Object) -> bool:
    """Return whether the pod is bound to a node."""
    condition = pod_condition(pod, "PodScheduled")
    return bool(node_of(pod)) or (condition is not None and condition["status"] == "True")


def node_of(pod: Object) -> str:
    """Return the name of the pod's node; empty if it is not bound."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def unschedulable_message(pod: Object) -> str | None:
    """Return the scheduler's message if it found no node, else None."""
    condition = pod_condition(pod, "PodScheduled")
    if condition is None or condition["status"] != "False" or condition.get("reason") != "Unschedulable":
        return None
    return str(condition.get("message", ""))


def unschedulable_pods(pods: Iterable[Object]) -> tuple[Object, ...]:
    """Return the pods for which the scheduler found no node, without those that are being deleted."""
    return tuple(pod for pod in pods if unschedulable_message(pod) is not None and not is_terminating(pod))


def gate_message(pod: Object) -> str | None:
    """Return what holds the pod back from the scheduler, and the remedy; None if no scheduling gate does."""
    condition = pod_condition(pod, "PodScheduled")
    if condition is None or condition["status"] != "False" or condition.get("reason") != "SchedulingGated":
        return None
    gates = [str(gate["name"]) for gate in pod.get("spec", {}).get("schedulingGates", ())]
    queue = pod["metadata"].get("labels", {}).get(QUEUE_LABEL)
    message = f"held by the scheduling gate {' and '.join(gates) or 'of another controller'}"
    if any(gate.startswith(_KUEUE) for gate in gates):
        return f"{message}: Kueue has not admitted it to the queue {queue}: see kubectl describe workloads"
    return f"{message}: see the controller that added it"


def pending_message(pod: Object) -> str | None:
    """Return why the pod has no node and gets none for now, else None.

    The message is the scheduler's, or names the scheduling gates.
    """
    return unschedulable_message(pod) or gate_message(pod)


def has_started(pod: Object) -> bool:
    """Return whether the engine runs and has passed its startup probe.

    It may serve requests even if it is not ready.
    """
    return any(
        status["name"] == ENGINE_CONTAINER and status.get("started") and "running" in status.get("state", {})
        for status in pod.get("status", {}).get("containerStatuses", ())
    )


def pod_condition(pod: Object, kind: str) -> dict[str, Any] | None:
    """Return the pod's condition of that type, or None."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return dict(condition)
    return None


def last_line(terminated: dict[str, Any]) -> str:
    """Return the last non-empty line of a terminated container's message, or an empty string."""
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return lines[-1] if lines else ""
