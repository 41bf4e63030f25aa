"""Which pods of a fleet serve or soon will, and how long a start takes. Pure.

Only ready pods, and pods that start no longer than usual, are supply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low
from typing import Final, Literal

PodState = Literal["Ready", "Starting", "Unschedulable", "Failing", "Lost", "Draining"]
"""Ready: serves. Starting: has a node, or waits for the scheduler, and does not take longer than usual. Unschedulable:
no node fits. Failing: crashes, or takes too long to become ready. Lost: its node does not respond. Draining: is being
deleted."""

# A start may take this many times the learned time. The two minimums, in seconds, are for the container, and for the
# time before it runs: pulling an image takes minutes on a new node.
_PATIENCE: Final = 2.0
_LEAST_LOAD_SECONDS: Final = 60.0
_LEAST_SETUP_SECONDS: Final = 300.0
# A pod that exists this long after its grace period has a node that does not respond.
_DELETION_SECONDS: Final = 60.0
# Starts remembered of each revision, and revisions remembered; the newest ones.
_STARTS: Final = 32
_REVISIONS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """What the supply model reads of one pod; times in seconds since 1970.

    Attributes:
        revision: the pod template's hash.
        scheduled_at: when it got a node; None without one.
        started_at: start of the engine's running container; None if it does not run.
        ended_at: end of its last container; None if the engine runs, or never ran.
        restarted: whether that container was started before.
        ready_since: when it became ready; None if it is not.
        unready_since: when it became not ready; None if it is ready or was never ready or unready.
        unschedulable: why it gets no node, else empty.
        has_room: whether the only node that it may run on has room for it; True if it may run on any.
        failure: why it fails, else empty.
        is_silent: whether its node does not respond.
        gone_by: end of its grace period; None if it is not being deleted.
    """

    name: str
    address: str | None = None
    revision: str = ""
    scheduled_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    restarted: bool = False
    ready_since: float | None = None
    unready_since: float | None = None
    unschedulable: str = ""
    has_room: bool = True
    failure: str = ""
    is_silent: bool = False
    gone_by: float | None = None


@dataclass(frozen=True, slots=True)
class StartTime:
    """Usual seconds of a start: until the container runs, and from then to ready."""

    setup: float
    load: float

    @property
    def seconds(self) -> float:
        """Seconds from the assignment of a node to ready."""
        return self.setup + self.load


@dataclass(frozen=True, slots=True)
class _Start:
    """One observed start; `setup` is None for a container that was restarted in place."""

    pod: str
    revision: str
    started_at: float
    setup: float | None
    load: float


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Observed starts of pods.

    Each is recorded once, when the pod first becomes ready after its container's start. A pod that restarts in place,
    or becomes ready a second time, does not change what was learned of its first start.
    """

    starts: tuple[_Start, ...] = ()

    def learn(self, pods: Iterable[PodView], longest: float) -> StartTimes:
        """Return the starts with those of ready pods.

        Args:
            longest: seconds after which the kubelet stops a container that is not ready. A pod that is ready later
                than that was ready before, so the time says nothing.
        """
        known = {(start.pod, start.started_at) for start in self.starts}
        found = [start for pod in pods if (start := _start_of(pod, longest)) is not None]
        fresh = [start for start in found if (start.pod, start.started_at) not in known]
        if not fresh:
            return self
        newest_first = sorted((*self.starts, *fresh), key=lambda start: start.started_at, reverse=True)
        revisions = list(dict.fromkeys(start.revision for start in newest_first))[:_REVISIONS]
        kept = [
            start
            for revision in revisions
            for start in [each for each in newest_first if each.revision == revision][:_STARTS]
        ]
        return StartTimes(tuple(kept))

    def expected(self, revision: str) -> StartTime | None:
        """Return the usual start of a revision; None if none was observed."""
        starts = [start for start in self.starts if start.revision == revision]
        if not starts:
            return None
        setups = [start.setup for start in starts if start.setup is not None]
        return StartTime(median_low(setups) if setups else 0.0, median_low(start.load for start in starts))

    def expected_of_next(self, revision: str) -> StartTime | None:
        """Return the usual start time of a revision.

        While none was observed, it is that of the latest revision that has one.
        """
        return self.expected(revision) or (self.expected(self.starts[0].revision) if self.starts else None)


def _start_of(pod: PodView, longest: float) -> _Start | None:
    if pod.ready_since is None or pod.started_at is None or pod.gone_by is not None:
        return None
    load = pod.ready_since - pod.started_at
    if not 0 <= load <= longest:
        return None
    first = pod.scheduled_at is not None and not pod.restarted
    setup = max(0.0, pod.started_at - pod.scheduled_at) if first and pod.scheduled_at is not None else None
    return _Start(pod.name, pod.revision, pod.started_at, setup, load)


@dataclass(frozen=True, slots=True)
class PodSupply:
    """The state of one pod, and why it is not ready.

    `passed` is how many seconds of its start have passed.
    """

    pod: str
    state: PodState
    message: str = ""
    passed: float = 0.0


def supply_of(pod: PodView, starts: StartTimes, longest: float, time: float) -> PodSupply:
    """Return the state of a pod at a time. Messages do not change while the state is the same."""
    if pod.gone_by is not None:
        if time > pod.gone_by + _DELETION_SECONDS:
            return PodSupply(pod.name, "Lost", "is being deleted, and its node does not confirm it")
        return PodSupply(pod.name, "Draining", "is being deleted")
    if pod.is_silent:
        return PodSupply(pod.name, "Lost", "its node does not respond")
    if pod.ready_since is not None:
        return PodSupply(pod.name, "Ready")
    if pod.unschedulable:
        return PodSupply(pod.name, "Unschedulable", pod.unschedulable)
    if pod.failure:
        return PodSupply(pod.name, "Failing", pod.failure)
    if pod.scheduled_at is None:
        return PodSupply(pod.name, "Starting", "waits for the scheduler")
    usual = starts.expected(pod.revision)
    if pod.started_at is None:
        passed = waited = max(0.0, time - max(pod.scheduled_at, pod.ended_at or 0.0))
        allowed = longest if usual is None else max(_LEAST_SETUP_SECONDS, _PATIENCE * usual.seconds)
        doing = "its container has not started"
    else:
        # The node's clock may be behind: no container starts before its pod has a node.
        began = max(pod.started_at, pod.scheduled_at)
        running = max(0.0, time - began)
        passed = running + (0.0 if usual is None else usual.setup)
        # A pod that was ready has as long to become ready again.
        waited = min(running, time - max(began, pod.unready_since or 0.0))
        allowed = longest if usual is None else max(_LEAST_LOAD_SECONDS, _PATIENCE * usual.load)
        doing = "its engine is not ready"
    if waited <= allowed:
        return PodSupply(pod.name, "Starting", doing, passed)
    return PodSupply(pod.name, "Failing", f"{doing} after {allowed:.0f} s{_compared(usual)}")


def _compared(usual: StartTime | None) -> str:
    return "" if usual is None else f"; a start usually takes {usual.seconds:.0f} s"
