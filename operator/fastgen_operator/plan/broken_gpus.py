"""Replacement of pods whose GPU failed or whose engine hung. Pure.

The kubelet restarts an engine in its pod, so on the same GPU; only a new pod can get another. The last replacement is
written to `status.lastReplacement` before the pod is deleted, so an operator that is stopped in between neither forgets
it nor deletes a second pod. See docs/decisions/039.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from fastgen_operator.kinds import Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_failures import Failure, failure_of
from fastgen_operator.plan.situation import Situation

# The kubelet's backoff for crashing containers: it doubles, and is reset after ten minutes without a crash.
FIRST_PAUSE: Final = timedelta(seconds=10)
LONGEST_PAUSE: Final = timedelta(minutes=5)
MEMORY: Final = timedelta(minutes=10)
# A pod created this soon after a replacement is the new pod.
_CREATED_WITHIN: Final = timedelta(minutes=1)
_REASONS: Final = ("DeviceFailed", "EngineHung")
_MESSAGE_LIMIT: Final = 1024


def last_replacement(situation: Situation) -> Object | None:
    """Return `status.lastReplacement`: the pod to replace now, else the last replaced one; None if there was none.

    One pod at a time is replaced, with a pause in between that doubles up to `LONGEST_PAUSE`.
    """
    last, now = _last(situation.observed), situation.now
    found = _broken_pods(situation)
    involved = (*(pod for pod in situation.observed.pods if pod.is_terminating), *(pod for pod, _ in found))
    is_under_way = last is not None and last["pod"] in (pod.name for pod in involved)
    if not found or is_under_way:
        return last
    count = 1
    if last is not None:
        since, pause = now - _time(last), _pause(last)
        # A clock that was set back ends the pause.
        if timedelta() <= since < pause:
            return last
        count = last["count"] + 1 if timedelta() <= since < pause + MEMORY else 1
    pod, failure = found[0]
    return {
        "pod": pod.name,
        "reason": failure.reason,
        "message": failure.message[:_MESSAGE_LIMIT],
        "count": count,
        "time": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def pods_with_broken_gpus(situation: Situation) -> tuple[tuple[Pod, str], ...]:
    """Return the pod to delete now, with the failure; empty if there is none.

    The status names it as the last replaced one, and its engine has not recovered.
    """
    replaced = (_last(situation.observed) or {}).get("pod")
    return tuple((pod, failure.message) for pod, failure in _broken_pods(situation) if pod.name == replaced)


def next_replacement(situation: Situation) -> datetime | None:
    """Return when the next pod may be replaced; None if no pod waits for the pause to end."""
    last = _last(situation.observed)
    if last is None or not _broken_pods(situation):
        return None
    due = _time(last) + _pause(last)
    return due if due > situation.now else None


def replaced_failure(observed: Observed) -> Failure | None:
    """Return the failure of the last replaced pod while the new pod is not ready; None otherwise."""
    last = _last(observed)
    if last is None:
        return None
    new = [pod for pod in observed.current_pods if _is_new(pod, last)]
    leaves = any(pod.is_terminating and pod.name == last["pod"] for pod in observed.pods)
    if (leaves and not new) or not all(pod.is_ready for pod in new):
        return Failure(last["reason"], f"{last['message']}; the pod was replaced, and the new one is not ready yet")
    return None


def _is_new(pod: Pod, last: Object) -> bool:
    if not pod.created or pod.name == last["pod"]:
        return False
    # The clock of the API server may be behind.
    return abs(datetime.fromisoformat(pod.created) - _time(last)) < _CREATED_WITHIN


def _broken_pods(situation: Situation) -> list[tuple[Pod, Failure]]:
    """Return the pods whose engine exited because its GPU failed or because it hung, with the failures.

    Pods whose engine has started again are left out. Empty on CPUs.
    """
    # A pod may claim its GPU by `resourceClaims`, with a count of 0.
    if situation.spec.engine.device == "cpu":
        return []
    # An engine that has started again may drain or be overloaded: it is not ready for another reason.
    stopped = (pod for pod in situation.observed.current_pods if not pod.is_ready and not pod.has_started)
    found = ((pod, failure_of(pod)) for pod in stopped)
    return [(pod, failure) for pod, failure in found if failure is not None and failure.reason in _REASONS]


def _last(observed: Observed) -> Object | None:
    last: Object | None = observed.resource.get("status", {}).get("lastReplacement")
    return last


def _time(last: Object) -> datetime:
    return datetime.fromisoformat(last["time"])


def _pause(last: Object) -> timedelta:
    # The exponent is bounded, because the count is not.
    doublings = min(int(last["count"]) - 1, 10)
    return min(LONGEST_PAUSE, FIRST_PAUSE * (1 << doublings))
