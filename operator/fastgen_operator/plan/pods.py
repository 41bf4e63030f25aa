"""What one pod's status says at a glance: ready, on a node, serving, on its way out. Pure."""

from __future__ import annotations

from typing import Any, Final

from fastgen_operator.kinds import Object

ENGINE_CONTAINER: Final = "engine"


def name_of(pod: Object) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


def is_ready(pod: Object) -> bool:
    """Whether it passes its readiness probe now."""
    condition = pod_condition(pod, "Ready")
    return condition is not None and condition["status"] == "True"


def is_on_its_way(pod: Object) -> bool:
    """Whether none of its containers has ended or finished its start yet: nothing has gone wrong so far."""
    status = pod.get("status", {})
    if has_ended(pod) or unschedulable_message(pod) is not None:
        return False
    containers = status.get("containerStatuses", ())
    return not any(
        each.get("started") or each.get("restartCount") or "terminated" in each.get("state", {}) for each in containers
    )


def is_leaving(pod: Object) -> bool:
    """Whether it is being deleted; it may still hold its node's GPUs until it is gone."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def has_ended(pod: Object) -> bool:
    """Whether only its record is left: evicted, refused by its node, or run to its end. It never runs again."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_scheduled(pod: Object) -> bool:
    """Whether it has a node."""
    condition = pod_condition(pod, "PodScheduled")
    return bool(node_of(pod)) or (condition is not None and condition["status"] == "True")


def node_of(pod: Object) -> str:
    """The node's name; empty where it has none."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def unschedulable_message(pod: Object) -> str | None:
    """The scheduler's words where it found no node; None otherwise."""
    condition = pod_condition(pod, "PodScheduled")
    if condition is None or condition["status"] != "False" or condition.get("reason") != "Unschedulable":
        return None
    return str(condition.get("message", ""))


def has_started(pod: Object) -> bool:
    """Whether its engine runs and has passed its startup probe: it may hold requests even where it is not ready now."""
    status = engine_status(pod)
    return bool(status.get("started")) and "running" in status.get("state", {})


def engine_status(pod: Object) -> dict[str, Any]:
    """The status of the engine's container; empty where the kubelet has not reported one."""
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if status["name"] == ENGINE_CONTAINER:
            return dict(status)
    return {}


def pod_condition(pod: Object, kind: str) -> dict[str, Any] | None:
    """The pod's condition of that type; None where it has none."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return dict(condition)
    return None
