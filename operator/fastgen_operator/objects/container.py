"""The containers of a pod, as the kubelet reports them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen_operator.kinds import Object

ENGINE_CONTAINER: Final = "engine"
FETCH_CONTAINER: Final = "fetch"
HTTP_PORT: Final = 8000
# Reasons of a waiting container whose image the kubelet cannot pull.
IMAGE_PULL_REASONS: Final = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"),
)
Role = Literal["engine", "container", "sidecar", "init container"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a container ended.

    Attributes:
        exit_code: None if it was not reported.
        started, finished: in RFC 3339; empty if unknown.
        last_line: the last non-empty line of its message; empty without one.
    """

    exit_code: int | None
    reason: str
    started: str
    finished: str
    last_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod.

    Attributes:
        is_ready: whether it passes its readiness probe, or is an init container that has succeeded.
        has_started: whether it has passed its startup probe.
        restarts: how often it was started again.
        running_since: in RFC 3339, empty if unknown; None if it does not run.
        is_terminated: whether it has ended and has not been started again.
        ended: the last ending; None if there was none.
        waiting, waiting_message: the kubelet's reason and message if it waits to start; else empty.
        memory_limit: None without one.
        readiness_path: path of its HTTP readiness probe, or the words "its readiness probe" for any other.
        startup_seconds: seconds in which its startup probe has to pass; 0 without one.
        grace: the pod's termination grace period, seconds.
        image_volumes: names and images of the pod's image volumes.
    """

    name: str = ""
    role: Role = "container"
    image: str = ""
    is_ready: bool = False
    has_started: bool = False
    restarts: int = 0
    running_since: str | None = None
    is_terminated: bool = False
    ended: Ending | None = None
    waiting: str = ""
    waiting_message: str = ""
    memory_limit: str | None = None
    readiness_path: str = ""
    startup_seconds: int = 0
    grace: int = 30
    image_volumes: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """The container as in a message."""
        return "the engine" if self.role == "engine" else f"{self.role} {self.name}"

    @property
    def is_running(self) -> bool:
        return self.running_since is not None

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended with exit code 0."""
        return self.is_terminated and self.ended is not None and self.ended.exit_code == 0


def containers_of(pod: Object, status: Object) -> Iterator[Container]:
    """Yield the containers that the status of a pod reports, init containers first; `pod` is its spec."""
    grace = int(pod.get("terminationGracePeriodSeconds", 30))
    image_volumes = image_volumes_of(pod)
    for kind in ("initContainer", "container"):
        specs = {spec["name"]: spec for spec in pod.get(f"{kind}s", ())}
        for reported in status.get(f"{kind}Statuses", ()):
            spec = specs.get(reported["name"], {})
            yield _container(_role(kind, reported["name"], spec), spec, reported, grace, image_volumes)


def image_volumes_of(pod: Object) -> tuple[tuple[str, str], ...]:
    """Return the names and images of the image volumes in the spec of a pod."""
    volumes = [volume for volume in pod.get("volumes", ()) if "image" in volume]
    return tuple((volume["name"], volume["image"].get("reference", "")) for volume in volumes)


def _container(
    role: Role, spec: Object, status: Object, grace: int, image_volumes: tuple[tuple[str, str], ...]
) -> Container:
    state = status.get("state", {})
    running, waiting, terminated = state.get("running"), state.get("waiting") or {}, state.get("terminated")
    ended = terminated or status.get("lastState", {}).get("terminated")
    return Container(
        name=status["name"],
        role=role,
        image=spec.get("image") or status.get("image", ""),
        is_ready=bool(status.get("ready")),
        has_started=bool(status.get("started")),
        restarts=int(status.get("restartCount", 0)),
        running_since=None if running is None else running.get("startedAt") or "",
        is_terminated=terminated is not None,
        ended=None if ended is None else _ending(ended),
        waiting=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        memory_limit=spec.get("resources", {}).get("limits", {}).get("memory"),
        readiness_path=spec.get("readinessProbe", {}).get("httpGet", {}).get("path", "its readiness probe"),
        startup_seconds=_probe_seconds(spec.get("startupProbe")),
        grace=grace,
        image_volumes=image_volumes,
    )


def _probe_seconds(probe: Object | None) -> int:
    return int(probe.get("periodSeconds", 10)) * int(probe.get("failureThreshold", 3)) if probe else 0


def _ending(terminated: Object) -> Ending:
    lines = [line.strip() for line in terminated.get("message", "").splitlines() if line.strip()]
    return Ending(
        exit_code=terminated.get("exitCode"),
        reason=terminated.get("reason", "Error"),
        started=terminated.get("startedAt") or "",
        finished=terminated.get("finishedAt") or "",
        last_line=lines[-1] if lines else "",
    )


def _role(kind: str, name: str, spec: dict[str, Any]) -> Role:
    if kind == "container":
        return "engine" if name == ENGINE_CONTAINER else "container"
    return "sidecar" if spec.get("restartPolicy") == "Always" else "init container"
