"""What one pod's status says: ready, unschedulable, or failing and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastgen_operator.kinds import Object

# The engine's exit code for a setting or a model that it cannot serve: starting again cannot help.
BAD_CONFIGURATION_EXIT: Final = 2
# From the third restart on, the kubelet's back-off makes a pod look alive and dead by turns.
CRASH_LOOP_RESTARTS: Final = 3

_IMAGE_REASONS: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CREATE_REASONS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a pod does not come up: a reason for programs, a message for people."""

    reason: str
    message: str


def name_of(pod: Object) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


def is_ready(pod: Object) -> bool:
    """Whether it passes its readiness probe now."""
    condition = _condition(pod, "Ready")
    return condition is not None and condition["status"] == "True"


def is_scheduled(pod: Object) -> bool:
    """Whether it has a node."""
    condition = _condition(pod, "PodScheduled")
    return bool(pod.get("spec", {}).get("nodeName")) or (condition is not None and condition["status"] == "True")


def unschedulable_message(pod: Object) -> str | None:
    """The scheduler's words where it found no node; None otherwise."""
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition["status"] != "False" or condition.get("reason") != "Unschedulable":
        return None
    return str(condition.get("message", ""))


def failure_of(pod: Object) -> Failure | None:
    """Why the pod's container does not come up; None while it starts, runs, or ended for the first times."""
    for status in pod.get("status", {}).get("containerStatuses", ()):
        if not status.get("ready"):
            failure = _container_failure(name_of(pod), status)
            if failure is not None:
                return failure
    return None


def _container_failure(pod: str, status: dict[str, Any]) -> Failure | None:
    waiting = status.get("state", {}).get("waiting", {})
    reason, words = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return Failure("ImagePullBackOff", f"pod {pod}: the image {status.get('image', '')} cannot be pulled: {words}")
    if reason in _CREATE_REASONS:
        return Failure("ContainerNotCreated", f"pod {pod}: {words or reason}")
    ended = next(_terminations(status), None)
    if ended is None:
        return None
    if ended.get("exitCode") == BAD_CONFIGURATION_EXIT:
        words = _last_line(ended) or "the engine refused its configuration (exit code 2)"
        return Failure("BadConfiguration", f"pod {pod}: {words}")
    restarts = status.get("restartCount", 0)
    if reason == "CrashLoopBackOff" or restarts >= CRASH_LOOP_RESTARTS:
        ending = f"ended with exit code {ended.get('exitCode')} ({ended.get('reason', 'Error')})"
        last = _last_line(ended)
        tail = f", last words: {last}" if last else ""
        return Failure("CrashLoopBackOff", f"pod {pod}: the engine {ending}, restarted {restarts} times{tail}")
    return None


def _terminations(status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for state in (status.get("state", {}), status.get("lastState", {})):
        if "terminated" in state:
            yield state["terminated"]


def _last_line(ended: dict[str, Any]) -> str:
    lines = [line.strip() for line in ended.get("message", "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _condition(pod: Object, kind: str) -> dict[str, Any] | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return dict(condition)
    return None
