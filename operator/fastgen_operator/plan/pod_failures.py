"""Derive from a pod's status why it does not serve: a condition's reason and message. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from fastgen import exit_codes
from fastgen_operator.kinds import Object
from fastgen_operator.pods import (
    ENGINE_CONTAINER,
    IMAGE_PULL_REASONS,
    is_scheduled,
    is_silent,
    last_line,
    name_of,
    node_of,
    pending_message,
)

# From the third restart on, the kubelet's backoff makes a pod appear running and crashed by turns.
CRASH_LOOP_RESTARTS: Final = 3
# The kubelet resets its backoff after a container has run this long.
CRASH_MEMORY: Final = timedelta(minutes=10)

_CREATE_REASONS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Exit codes of a process that was stopped: clean exit after SIGTERM, SIGKILL, SIGTERM.
_STOPPED_EXIT_CODES: Final = (0, 137, 143)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a pod: a condition's reason and message."""

    reason: str
    message: str


# By the engine's own exit codes, with what is said if it ended without a message.
_ENGINE_FAILURES: Final = {
    exit_codes.BAD_CONFIGURATION: Failure("BadConfiguration", "the engine rejected its configuration"),
    exit_codes.DEVICE_FAILED: Failure("DeviceFailed", "the engine's GPU failed"),
    exit_codes.HUNG: Failure("EngineHung", "the engine finished no step in time"),
}


@dataclass(frozen=True, slots=True)
class _Container:
    """One container of a pod: its spec and status. `grace` is the pod's termination grace period, seconds."""

    role: Literal["engine", "container", "sidecar", "init container"]
    spec: dict[str, Any]
    status: dict[str, Any]
    grace: int

    @property
    def title(self) -> str:
        return "the engine" if self.role == "engine" else f"{self.role} {self.status['name']}"

    @property
    def running(self) -> dict[str, Any] | None:
        running: dict[str, Any] | None = self.status.get("state", {}).get("running")
        return running

    @property
    def waiting(self) -> dict[str, Any]:
        return dict(self.status.get("state", {}).get("waiting", {}))

    @property
    def restarts(self) -> int:
        return int(self.status.get("restartCount", 0))

    @property
    def ended(self) -> dict[str, Any] | None:
        """The last termination, with times; None if there was none."""
        for state in (self.status.get("state", {}), self.status.get("lastState", {})):
            if "terminated" in state:
                return dict(state["terminated"])
        return None

    @property
    def is_done(self) -> bool:
        """Whether the container is an init container that has completed."""
        ended = self.status.get("state", {}).get("terminated", {})
        return self.role == "init container" and ended.get("exitCode") == 0


def failure_of(pod: Object, at: datetime | None = None) -> Failure | None:
    """Return why the pod does not become ready; None while it starts, runs, or has crashed only a few times.

    Args:
        at: time of the observation, with a time zone. A container with several crashes counts as failing for
            `CRASH_MEMORY` after the last one, even if it is ready in between. None: ready containers never fail.
    """
    for container in _containers(pod):
        if _may_fail(container, at):
            failure = _failure(container)
            if failure is not None:
                return Failure(failure.reason, f"pod {name_of(pod)}: {failure.message}")
    return None


def state_of(pod: Object, known: Mapping[str, Failure] | None = None) -> str:
    """Describe the state of a pod that is not ready; the message does not change over time.

    Args:
        known: failures that the pods' Events name, by pod name.
    """
    failure = failure_of(pod) or (known or {}).get(name_of(pod))
    if failure is not None:
        return failure.message
    return f"pod {name_of(pod)}: {_state(pod)}"


def _state(pod: Object) -> str:
    words = pending_message(pod)
    if words is not None:
        return words
    if not is_scheduled(pod):
        return "waits for the scheduler"
    containers = [container for container in _containers(pod) if not container.is_done]
    for container in containers:
        if container.running is None and container.ended is not None:
            return f"{container.title} {_ending(container)}"
        if container.waiting.get("reason", "PodInitializing") not in ("PodInitializing", "ContainerCreating"):
            return f"{container.title}: {container.waiting.get('message') or container.waiting['reason']}"
    for container in containers:
        if container.running is not None and not container.status.get("ready"):
            return _running(container, container.running.get("startedAt", ""))
    if is_silent(pod):
        return f"its node {node_of(pod)} does not respond; it last reported the pod as ready"
    return f"starts on node {node_of(pod)}"


def _running(container: _Container, since: str) -> str:
    if container.role == "init container":
        return f"{container.title} has been running since {since}"
    probe = container.spec.get("readinessProbe", {}).get("httpGet", {}).get("path", "its readiness probe")
    if container.status.get("started"):
        cause = "it is draining, overloaded or hung"
        return f"{container.title} has been running since {since}, but {probe} fails: {cause}"
    earlier = f" again, after it {_ending(container)}" if container.ended is not None else ""
    return f"{container.title} has been loading since {since}{earlier}; {probe} has not passed yet"


def _containers(pod: Object) -> Iterator[_Container]:
    """Yield the containers, init containers first: while one fails, no later container has started."""
    grace = int(pod.get("spec", {}).get("terminationGracePeriodSeconds", 30))
    for kind in ("initContainer", "container"):
        specs = {spec["name"]: spec for spec in pod.get("spec", {}).get(f"{kind}s", ())}
        for status in pod.get("status", {}).get(f"{kind}Statuses", ()):
            spec = specs.get(status["name"], {})
            yield _Container(_role(kind, status["name"], spec), spec, status, grace)


def _role(kind: str, name: str, spec: dict[str, Any]) -> Literal["engine", "container", "sidecar", "init container"]:
    if kind == "container":
        return "engine" if name == ENGINE_CONTAINER else "container"
    return "sidecar" if spec.get("restartPolicy") == "Always" else "init container"


def _may_fail(container: _Container, at: datetime | None) -> bool:
    if container.is_done:
        return False
    if not container.status.get("ready"):
        return True
    return at is not None and container.restarts >= CRASH_LOOP_RESTARTS and _ended_lately(container, at)


def _ended_lately(container: _Container, at: datetime) -> bool:
    finished = (container.ended or {}).get("finishedAt")
    # The node's clock may be ahead; if by more than this, a crash is forgotten at once instead of remembered for hours.
    return finished is not None and abs(at - datetime.fromisoformat(finished)) < CRASH_MEMORY


def _failure(container: _Container) -> Failure | None:
    reason, words = container.waiting.get("reason", ""), container.waiting.get("message", "")
    if reason in IMAGE_PULL_REASONS:
        image = container.spec.get("image") or container.status.get("image", "")
        return Failure(
            "ImagePullBackOff", f"the image {image} of {container.title} cannot be pulled: {words or reason}"
        )
    if reason in _CREATE_REASONS:
        return Failure("ContainerNotCreated", f"{container.title} cannot be created: {words or reason}")
    ended = container.ended
    if ended is None:
        return None
    if ended.get("reason") == "OOMKilled":
        return Failure("OutOfMemory", f"{container.title} {_ending(container)}{_times(container)}")
    known = _ENGINE_FAILURES.get(ended.get("exitCode", 0)) if container.role == "engine" else None
    if known is not None:
        words = last_line(ended) or f"{known.message} (exit code {ended['exitCode']}) without a message"
        return Failure(known.reason, words + _times(container))
    if _exceeded_startup(container, ended):
        return Failure("StartupDeadlineExceeded", f"{container.title} {_ending(container)}{_times(container)}")
    if reason == "CrashLoopBackOff" or container.restarts >= CRASH_LOOP_RESTARTS:
        return Failure("CrashLoopBackOff", f"{container.title} {_ending(container)}{_times(container)}")
    return None


def _ending(container: _Container) -> str:
    """Describe the last termination of the container."""
    ended = container.ended or {}
    code, reason = ended.get("exitCode"), ended.get("reason", "Error")
    last = last_line(ended)
    tail = f"; last log line: {last}" if last else ""
    if reason == "OOMKilled":
        limit = container.spec.get("resources", {}).get("limits", {}).get("memory")
        had = f"its limit of {limit}" if limit else "its node had left, as it has no limit"
        return f"was killed for using more memory than {had}{tail}"
    if _exceeded_startup(container, ended):
        return f"was stopped because it was not ready {_startup_seconds(container)} s after its start{tail}"
    if code in _STOPPED_EXIT_CODES and container.role == "engine":
        return f"was stopped from outside (exit code {code}), for example after failed liveness probes{tail}"
    return f"ended with exit code {code} ({reason}){tail}"


def _times(container: _Container) -> str:
    return f"; restarted {container.restarts} times" if container.restarts > 1 else ""


def _exceeded_startup(container: _Container, ended: dict[str, Any]) -> bool:
    """Return whether the kubelet stopped the container because its startup probe did not pass in time."""
    allowed = _startup_seconds(container)
    start, finish = ended.get("startedAt"), ended.get("finishedAt")
    if not allowed or not start or not finish or ended.get("exitCode") not in _STOPPED_EXIT_CODES:
        return False
    lived = (datetime.fromisoformat(finish) - datetime.fromisoformat(start)).total_seconds()
    return allowed <= lived <= allowed + container.grace


def _startup_seconds(container: _Container) -> int:
    probe = container.spec.get("startupProbe")
    return int(probe.get("periodSeconds", 10)) * int(probe.get("failureThreshold", 3)) if probe else 0
