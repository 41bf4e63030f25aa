"""Which pods of a fleet serve or soon will, and how long a pod takes to start. Pure.

Only ready pods, and pods whose start is not overdue, are supply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median_low
from typing import Final, Literal

from fastgen_operator.objects.pod import Pod

PodState = Literal["Ready", "Starting", "Unschedulable", "Failing", "Lost", "Draining"]
"""Ready: serves. Starting: waits for the scheduler, or has a node and is not overdue. Unschedulable: no node fits, or
a scheduling gate holds it back. Failing: crashes, cannot start, or takes too long to become ready. Lost: its node does
not respond. Draining: is being deleted."""

# A start is overdue after this many times the learned time, but not before these minimums, in seconds: for a container
# to become ready, and for the time before it runs. On a new node, pulling an image takes minutes.
_PATIENCE: Final = 2.0
_LEAST_LOAD_SECONDS: Final = 60.0
_LEAST_SETUP_SECONDS: Final = 300.0
# If a pod still exists this long after its grace period, its node does not respond.
_DELETION_SECONDS: Final = 60.0
# The newest starts of each of the newest revisions are remembered, up to these numbers.
_STARTS: Final = 32
_REVISIONS: Final = 4


@dataclass(frozen=True, slots=True)
class StartTime:
    """Seconds that a start usually takes: until the container runs, and from then to ready."""

    setup: float
    load: float

    @property
    def seconds(self) -> float:
        """Seconds from the assignment of a node to ready."""
        return self.setup + self.load


@dataclass(frozen=True, slots=True)
class _Start:
    """One observed start. `setup` is None for a container that was restarted in its pod."""

    pod: str
    revision: str
    started_at: float
    setup: float | None
    load: float


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Observed starts of pods, the newest first.

    Each start of a container is recorded once, when its pod first becomes ready after it.
    """

    starts: tuple[_Start, ...] = ()

    def learn(self, pods: Iterable[Pod], longest: float) -> StartTimes:
        """Return the starts with those of ready pods.

        Args:
            longest: seconds after which the kubelet restarts a container that is not ready. If a pod became ready
                later than that, it was ready before, and the time is not that of a start.
        """
        known = {(start.pod, start.started_at) for start in self.starts}
        found = [start for pod in pods if (start := _start_of(pod, longest)) is not None]
        fresh = [start for start in found if (start.pod, start.started_at) not in known]
        if not fresh:
            return self
        by_revision: dict[str, list[_Start]] = {}
        for start in sorted((*self.starts, *fresh), key=lambda start: start.started_at, reverse=True):
            by_revision.setdefault(start.revision, []).append(start)
        return StartTimes(tuple(start for of in islice(by_revision.values(), _REVISIONS) for start in of[:_STARTS]))

    def expected(self, revision: str) -> StartTime | None:
        """Return the usual start time of a revision; None if no start was observed."""
        starts = [start for start in self.starts if start.revision == revision]
        if not starts:
            return None
        setups = [start.setup for start in starts if start.setup is not None]
        return StartTime(median_low(setups) if setups else 0.0, median_low(start.load for start in starts))

    def expected_of_next(self, revision: str) -> StartTime | None:
        """Return the usual start time of a revision, else of the revision that started last; None if unknown."""
        return self.expected(revision) or (self.expected(self.starts[0].revision) if self.starts else None)


def _start_of(pod: Pod, longest: float) -> _Start | None:
    if pod.ready_since is None or pod.started_at is None or pod.is_terminating:
        return None
    load = pod.ready_since - pod.started_at
    if not 0 <= load <= longest:
        return None
    setup = None if pod.engine.restarts or pod.scheduled_at is None else max(0.0, pod.started_at - pod.scheduled_at)
    return _Start(pod.name, pod.revision, pod.started_at, setup, load)


@dataclass(frozen=True, slots=True)
class PodSupply:
    """The state of one pod, why it is not ready, and how many seconds of its start have passed.

    It is not part of `Pod`, which is one version of the pod's object: the state also follows from the time, Events and
    the starts of other pods.
    """

    pod: Pod
    state: PodState
    message: str = ""
    passed: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadingStage:
    """What an engine says it does while it loads.

    Attributes:
        pod: name of the engine's pod.
        since: when the engine's container started, in RFC 3339; empty if unknown, None if it did not run.
        text: such as `loading weights 40 %`.
    """

    pod: str
    since: str | None
    text: str

    def is_of(self, pod: Pod) -> bool:
        """Return whether the stage is that of the container that runs in the pod now."""
        return (self.pod, self.since) == (pod.name, pod.engine.running_since)


def supply_of(pod: Pod, failure: str, starts: StartTimes, longest: float, time: float) -> PodSupply:
    """Return the state of a pod at a time. Equal states have equal messages.

    Args:
        failure: why the pod fails, else empty.
        longest: seconds in which a container must become ready.
        time: seconds since 1970.
    """
    if pod.gone_at is not None:
        if time > pod.gone_at + _DELETION_SECONDS:
            return PodSupply(pod, "Lost", "is being deleted, and its node does not confirm it")
        return PodSupply(pod, "Draining", "is being deleted")
    if pod.is_silent:
        return PodSupply(pod, "Lost", "its node does not respond")
    if pod.ready_since is not None:
        return PodSupply(pod, "Ready")
    if pod.no_node:
        return PodSupply(pod, "Unschedulable", pod.no_node)
    if failure:
        return PodSupply(pod, "Failing", failure)
    if pod.scheduled_at is None:
        return PodSupply(pod, "Starting", "waits for the scheduler")
    usual = starts.expected(pod.revision)
    if pod.started_at is None:
        passed = waited = max(0.0, time - max(pod.scheduled_at, pod.ended_at or 0.0))
        allowed = longest if usual is None else max(_LEAST_SETUP_SECONDS, _PATIENCE * usual.seconds)
        doing = "its container has not started"
    else:
        # The node's clock may be behind: no container starts before a node is assigned.
        began = max(pod.started_at, pod.scheduled_at)
        running = max(0.0, time - began)
        passed = running + (0.0 if usual is None else usual.setup)
        # A pod that was ready has as long to become ready again.
        waited = min(running, time - max(began, pod.unready_since or 0.0))
        allowed = longest if usual is None else max(_LEAST_LOAD_SECONDS, _PATIENCE * usual.load)
        doing = pod.readiness_gate or "its engine is not ready"
    if waited <= allowed:
        return PodSupply(pod, "Starting", doing, passed)
    compared = "" if usual is None else f"; a start usually takes {usual.seconds:.0f} s"
    return PodSupply(pod, "Failing", f"{doing} after {allowed:.0f} s{compared}")
