"""Derive from Events what no status says: why a pod has no containers, and why a Job has no pod. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Object
from fastgen_operator.objects.model_cache import Job
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.pod_failures import (
    IMAGE_VOLUMES_NEED,
    IMAGE_VOLUMES_UNSUPPORTED,
    Failure,
    lacks_image_volumes,
)

# A pod that has been without containers for this long may be stuck, and so may a Job without pods.
PATIENCE: Final = timedelta(seconds=2)

# A warning that is older than one of these no longer applies.
_PROGRESS: Final = ("SuccessfulAttachVolume", "Pulling", "Pulled", "Created", "Started")
# A warning that is not repeated may no longer apply. The attach controller records each of its own only once.
_REPEATED: Final = 2
_DEVICES: Final = "FailedPrepareDynamicResources"
# The kubelet says this in addition to the cause.
_VAGUE: Final = "Unable to attach or mount volumes"
# The attach controller says this of a volume that another node has.
_ELSEWHERE: Final = "Multi-Attach error"
_RELEASE: Final = (
    "a ReadWriteOnce volume is on one node at a time. It is released when no pod on the other node uses it; if that "
    "node has failed, taint it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute. For several nodes, use a "
    "ReadWriteMany volume (spec.cache.accessMode, or that of your own claim)"
)

_REFUSED: Final = "FailedCreate"
# Removed from the message: the prefixes of the Job controller and the Event recorder, and the name of the pod, which
# differs at each attempt.
_PREFIXES: Final = ("(combined from similar events): ", "Error creating: ")
_RANDOM: Final = r'pods? "{}-[a-z0-9]{{5}}" is '


def lacks_containers(pod: Pod, at: datetime) -> bool:
    """Return whether the pod has a node, but its containers are still being created `PATIENCE` after the pod."""
    if pod.has_ended or pod.is_terminating or not pod.node:
        return False
    if any(each.is_running or each.is_terminated for each in pod.containers):
        return False
    reasons = {each.waiting for each in pod.containers}
    return reasons <= {"ContainerCreating", "PodInitializing", ""} and _has_waited(pod.created, at)


def failure_in_events(pod: Pod, events: Iterable[Object]) -> Failure | None:
    """Return why the pod has no containers; None if its Events do not say."""
    mine = [event for event in events if event["involvedObject"].get("uid") == pod.uid]
    progress = max((_time(event) for event in mine if event.get("reason") in _PROGRESS), default=None)
    warnings = [event for event in mine if event.get("type") == "Warning"]
    recent = [event for event in warnings if progress is None or _time(event) >= progress]
    # Causes before their effects. Source: k8s.io/kubernetes/pkg/kubelet/events/event.go, and the attach controller.
    return (
        _failure("FailedAttachVolume", 1, "a volume cannot be attached to its node", pod, recent)
        or _failure("FailedMount", _REPEATED, "a volume cannot be mounted", pod, recent)
        or _failure("FailedMount", _REPEATED, "a block volume cannot be mapped", pod, recent, "FailedMapVolume")
        or _failure("FailedCreatePodSandBox", _REPEATED, "its node has no network", pod, recent, "NetworkNotReady")
        or _failure("FailedCreatePodSandBox", _REPEATED, "its network or sandbox cannot be created", pod, recent)
        or _failure("ContainerNotCreated", _REPEATED, "its devices cannot be prepared", pod, recent, _DEVICES)
    )


def lacks_pods(job: Job, pods: Iterable[Pod], at: datetime) -> bool:
    """Return whether the Job is neither suspended nor finished, but after `PATIENCE` has none of these pods.

    Evicted pods do not count: the Job has to start another one.
    """
    conditions = job.status.get("conditions", ())
    if job.spec.get("suspend") or any(condition["status"] == "True" for condition in conditions):
        return False
    remaining = (pod for pod in pods if pod.phase != "Failed")
    return not any(pod.controller == job.uid for pod in remaining) and _has_waited(job.created, at)


def refusal_in_events(job: Job, events: Iterable[Object]) -> Failure | None:
    """Return why the API server rejects the Job's pod, with its message; None if the last Event does not say."""
    mine = [event for event in events if event["involvedObject"].get("uid") == job.uid]
    last = max(mine, key=_time, default=None)
    if last is None or last.get("reason") != _REFUSED:
        return None
    words, name = str(last.get("message", "")), job.name
    for prefix in _PREFIXES:
        words = words.removeprefix(prefix)
    words = re.sub(_RANDOM.format(re.escape(name)), "", words)
    return Failure(_REFUSED, f"the API server rejects the pod of Job {name}: {words}")


def _has_waited(created: str, at: datetime) -> bool:
    """Return whether the object was created at least `PATIENCE` ago.

    A time as far in the future counts, too: the operator's clock may be behind.
    """
    return abs(at - datetime.fromisoformat(created)) >= PATIENCE


def _failure(
    reason: str, count: int, words: str, pod: Pod, warnings: Sequence[Object], of_events: str = ""
) -> Failure | None:
    """Return the failure that repeated warnings name, in a condition's words.

    Args:
        count: least number of occurrences of a warning.
        of_events: the reason of the Events, if it is another one than the condition's.
    """
    name = of_events or reason
    found = [event for event in warnings if event.get("reason") == name and _count(event) >= count]
    if not found:
        return None
    # In an order that does not depend on time, so that the message stays.
    first = min((str(event.get("message", "")) for event in found), key=lambda text: (text.startswith(_VAGUE), text))
    remedy = f"; {_RELEASE}" if _ELSEWHERE in first else ""
    if lacks_image_volumes(pod.image_volumes, first):
        reason, remedy = IMAGE_VOLUMES_UNSUPPORTED, f"; {IMAGE_VOLUMES_NEED}"
    return Failure(reason, f"pod {pod.name} on node {pod.node}: {words}: {first}{remedy}")


def _count(event: Object) -> int:
    return max(int(event.get("count") or 1), int((event.get("series") or {}).get("count") or 1))


def _time(event: Object) -> datetime:
    """Return when the event was seen last. Each API version of Events has another field for it."""
    series = event.get("series") or {}
    time = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return datetime.fromisoformat(time or event["metadata"]["creationTimestamp"])
