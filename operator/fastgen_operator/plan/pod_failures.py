"""Derive from the status of pods why they do not serve: a condition's reason and message. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from fastgen import exit_codes
from fastgen_operator.objects.container import IMAGE_PULL_REASONS, Container, Ending
from fastgen_operator.objects.pod import Pod

# From the third restart on, the kubelet's backoff makes a pod appear running and crashed by turns.
CRASH_LOOP_RESTARTS: Final = 3
# The kubelet resets its backoff after a container has run this long.
CRASH_MEMORY: Final = timedelta(minutes=10)
# From this number of ended pods on, the cause is not a single node.
ENDED_PODS: Final = 3

_CREATE_REASONS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# containerd makes an id for each attempt. The message changes only with the cause.
_NEW_CONTAINER: Final = re.compile(r'container "[0-9a-f]{64}"')
# What a node says that does not support image volumes: containerd before 2.1, which sees a mount without a path, and
# the kubelet (k8s.io/kubernetes/pkg/volume/plugins.go) without its feature gate, in an Event.
_NO_IMAGE_VOLUMES: Final = ('failed to mkdir ""', "no volume plugin matched")
IMAGE_VOLUMES_UNSUPPORTED: Final = "ImageVolumesUnsupported"
IMAGE_VOLUMES_NEED: Final = (
    "a node mounts images as volumes with containerd 2.1 or later or CRI-O, and with the kubelet's feature gate "
    "ImageVolume, which is on from Kubernetes 1.35"
)
_NO_SUCH_FILE: Final = "no such file or directory"  # fastgen.model.source
# Exit codes of a process that was stopped: clean exit after SIGTERM, SIGKILL, SIGTERM.
_STOPPED_EXIT_CODES: Final = (0, 137, 143)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of pods or of a Job: a condition's reason and message."""

    reason: str
    message: str


# By the engine's own exit codes, with the message to show if it ended without one.
_ENGINE_FAILURES: Final = {
    exit_codes.BAD_CONFIGURATION: Failure("BadConfiguration", "the engine rejected its configuration"),
    exit_codes.DEVICE_FAILED: Failure("DeviceFailed", "the engine's GPU failed"),
    exit_codes.HUNG: Failure("EngineHung", "the engine finished no step in time"),
}


def failure_of(pod: Pod, at: datetime | None = None) -> Failure | None:
    """Return why the pod does not become ready; None if no failure is known.

    A crash without a known cause counts from the kubelet's CrashLoopBackOff or from `CRASH_LOOP_RESTARTS` restarts on.

    Args:
        at: time of the observation, with a time zone. A container with several crashes counts as failing for
            `CRASH_MEMORY` after the last one, even if it is ready in between. None: ready containers never fail.
    """
    for container in pod.containers:
        if _may_fail(container, at) and (failure := _failure(container)) is not None:
            return Failure(failure.reason, f"pod {pod.name}: {failure.message}")
    return None


def failure_of_ended(ended: Iterable[Pod], current: Sequence[Pod], wanted: int) -> Failure | None:
    """Return the failure of a Deployment whose pods end instead of becoming ready; None if only a few ended.

    Pods older than a ready one do not count. None, too, if enough pods are ready.

    Args:
        ended: pods that were evicted or rejected by their nodes.
        current: the pods of the current template.
        wanted: desired replicas.
    """
    since = max((pod.condition("Ready").get("lastTransitionTime", "") for pod in current if pod.is_ready), default="")
    # Ended pods stay for days: those that a ready pod has followed say nothing about the pods that start now.
    newest = [pod for pod in ended if not since or pod.created > since]
    if len(newest) < ENDED_PODS or sum(pod.is_ready for pod in current) >= wanted:
        return None
    last = max(newest, key=lambda pod: (pod.created, pod.name))
    return Failure("PodsFailed", f"{len(newest)} pods were evicted or rejected by their nodes; {last.end}")


def lacks_image_volumes(image_volumes: tuple[tuple[str, str], ...], words: str) -> bool:
    """Return whether the words of a node say that it does not support the pod's image volumes."""
    return bool(image_volumes) and any(part in words for part in _NO_IMAGE_VOLUMES)


def summary_of(pod: Pod, known: Mapping[str, Failure] | None = None) -> str:
    """Return reason and message of a pod's failure; empty without one. `known` are those that pods' Events name."""
    failure = failure_of(pod) or (known or {}).get(pod.name)
    return "" if failure is None else f"{failure.reason}: {failure.message}"


def state_of(pod: Pod, known: Mapping[str, Failure] | None = None, stage: str = "") -> str:
    """Describe the state of a pod that is not ready; the message changes only with the state, not with time.

    Args:
        known: failures that the pods' Events name, by pod name.
        stage: what the pod's engine does if it is loading; empty if unknown.
    """
    failure = failure_of(pod) or (known or {}).get(pod.name)
    return f"pod {pod.name}: {_state(pod, stage)}" if failure is None else failure.message


def _state(pod: Pod, stage: str) -> str:
    if (words := pod.pending) is not None:
        return words
    if not pod.is_scheduled:
        return "waits for the scheduler"
    containers = [container for container in pod.containers if not _is_done(container)]
    for container in containers:
        if not container.is_running and container.ended is not None:
            return f"{container.title} {_ending(container, container.ended)}"
        if container.waiting not in ("", "PodInitializing", "ContainerCreating"):
            return f"{container.title}: {container.waiting_message or container.waiting}"
    for container in containers:
        if container.running_since is not None and not container.is_ready:
            return _running(container, container.running_since, stage if container.role == "engine" else "")
    if pod.is_silent:
        return f"its node {pod.node} does not respond; it last reported the pod as ready"
    if pod.readiness_gate is not None:
        return pod.readiness_gate
    return f"starts on node {pod.node}"


def _running(container: Container, since: str, stage: str) -> str:
    if container.role == "init container":
        return f"{container.title} has been running since {since}"
    if container.has_started:
        cause = "it is draining, overloaded or hung"
        return f"{container.title} has been running since {since}, but {container.readiness_path} fails: {cause}"
    earlier = "" if container.ended is None else f" again, after it {_ending(container, container.ended)}"
    if stage:
        return f"{container.title} has been loading since {since}{earlier}: {stage}"
    return f"{container.title} has been loading since {since}{earlier}; {container.readiness_path} has not passed yet"


def _is_done(container: Container) -> bool:
    return container.role == "init container" and container.has_succeeded


def _may_fail(container: Container, at: datetime | None) -> bool:
    if _is_done(container) or not container.is_ready:
        return not _is_done(container)
    finished = "" if container.ended is None else container.ended.finished
    if at is None or not finished or container.restarts < CRASH_LOOP_RESTARTS:
        return False
    # The node's clock may be ahead; if by more than this, a crash is forgotten at once instead of remembered for hours.
    return abs(at - datetime.fromisoformat(finished)) < CRASH_MEMORY


def _failure(container: Container) -> Failure | None:
    reason, title = container.waiting, container.title
    words = container.waiting_message or reason
    if reason in IMAGE_PULL_REASONS:
        return Failure("ImagePullBackOff", f"{_pulled(container, words)} cannot be pulled: {words}")
    if reason in _CREATE_REASONS:
        words = _NEW_CONTAINER.sub("container", words)
        if lacks_image_volumes(container.image_volumes, words):
            return Failure(IMAGE_VOLUMES_UNSUPPORTED, f"{title} cannot be created: {words}: {IMAGE_VOLUMES_NEED}")
        return Failure("ContainerNotCreated", f"{title} cannot be created: {words}")
    ended = container.ended
    if ended is None:
        return None
    times = f"; restarted {container.restarts} times" if container.restarts > 1 else ""
    known = _ENGINE_FAILURES.get(ended.exit_code or 0) if container.role == "engine" else None
    message = f"{title} {_ending(container, ended)}{times}"
    if ended.reason == "OOMKilled":
        return Failure("OutOfMemory", message)
    if known is not None:
        words = ended.last_line or f"{known.message} (exit code {ended.exit_code}) without a message"
        if container.image_volumes and _NO_SUCH_FILE in words:
            # Some nodes without support mount an empty folder.
            words += f"; if the image has it, {IMAGE_VOLUMES_NEED}"
        return Failure(known.reason, words + times)
    if _exceeded_startup(container, ended):
        return Failure("StartupDeadlineExceeded", message)
    if reason == "CrashLoopBackOff" or container.restarts >= CRASH_LOOP_RESTARTS:
        return Failure("CrashLoopBackOff", message)
    return None


def _pulled(container: Container, words: str) -> str:
    """Return which image the words are about: the kubelet reports those of image volumes as that of the container."""
    images = {container.image: f"the image {container.image} of {container.title}"}
    images |= {image: f"the image {image} of the volume {name}" for name, image in container.image_volumes}
    # A runtime may leave out a tag beside a digest. The longest match counts: one may be a part of another.
    named = {
        image: max((len(part) for part in (image, _repository(image)) if part in words), default=0) for image in images
    }
    best = max(named.values())
    return " or ".join(title for image, title in images.items() if named[image] == best)


def _repository(image: str) -> str:
    """Return the image without its tag and digest."""
    name = image.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def _ending(container: Container, ended: Ending) -> str:
    """Describe the last ending of the container."""
    tail = f"; last log line: {ended.last_line}" if ended.last_line else ""
    if ended.reason == "OOMKilled":
        limit = container.memory_limit
        had = f"its limit of {limit}" if limit else "its node had left, as it has no limit"
        return f"was killed for using more memory than {had}{tail}"
    if _exceeded_startup(container, ended):
        return f"was stopped because it was not ready {container.startup_seconds} s after its start{tail}"
    if ended.exit_code in _STOPPED_EXIT_CODES and container.role == "engine":
        words = f"was stopped from outside (exit code {ended.exit_code})"
        return f"{words}, for example after failed liveness probes{tail}"
    return f"ended with exit code {ended.exit_code} ({ended.reason}){tail}"


def _exceeded_startup(container: Container, ended: Ending) -> bool:
    """Return whether the kubelet stopped the container because its startup probe did not pass in time."""
    allowed = container.startup_seconds
    if not allowed or not ended.started or not ended.finished or ended.exit_code not in _STOPPED_EXIT_CODES:
        return False
    lived = (datetime.fromisoformat(ended.finished) - datetime.fromisoformat(ended.started)).total_seconds()
    return allowed <= lived <= allowed + container.grace
