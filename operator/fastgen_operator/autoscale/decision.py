"""The autoscaler's decision and its reasons. Messages are stable while the decision is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Change:
    """Reason for the current number of replicas: the last change since the autoscaler started."""

    reason: Literal[
        "KVCacheFull",
        "DemandGrew",
        "DemandJumped",
        "BacklogTooLong",
        "ReplicasMissing",
        "ReplicasReplaced",
        "DemandFell",
        "BoundsChanged",
        "ScheduleStarted",
    ]
    message: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Reason why the number of replicas is held regardless of the load."""

    reason: Literal["NoReadyReplicas", "NoMetrics", "MetricsStale", "CapacityUnknown", "HoldAfterRestart"]
    message: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Reason why the fleet is smaller or larger than the load requires."""

    reason: Literal["VolumeOnOneNode", "TooManyReplicas", "TooFewReplicas", "RateLimited"]
    message: str


# Change of the demand from which the status tells it again: relative, and in replicas, for idle fleets.
_MOVED: Final = 0.3
_MOVED_REPLICAS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Sizing:
    """The arithmetic of a decision by demand.

    Attributes:
        demand: arriving forward tokens per second.
        capacity: forward tokens per second that a replica computes within the latency targets.
        utilization: target share of the capacity.
        missing: replicas beyond the demand, for pods that do not serve.
        is_warm: whether the demand was measured for long enough to correct one that was told before.
    """

    demand: float
    capacity: float
    utilization: float
    missing: float
    is_warm: bool = True

    @property
    def required(self) -> float:
        """Replicas that the demand requires, as a fraction, without the missing ones."""
        return self.demand / (self.capacity * self.utilization)

    def differs(self, told: float | None) -> bool:
        """Return whether the demand is notably different from the one told last, or none was told.

        The first intervals after a restart of the operator are noise: they correct nothing.
        """
        if told is None:
            return True
        return self.is_warm and abs(self.demand - told) > max(_MOVED * told, _MOVED_REPLICAS * self.capacity)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Equal decisions need no reconcile.

    Attributes:
        replicas: desired replicas.
        change: reason for this number; None if the autoscaler has not changed it yet.
        hold: set if the number is held regardless of the load.
        limit: set if a bound or rate limit overrides the load.
        load: demand in fully utilized replicas, for the metrics. Fluctuates, so it is not compared.
        sizing: the arithmetic; None if no demand or capacity is known. Not compared either.
    """

    replicas: int
    change: Change | None = None
    hold: Hold | None = None
    limit: Limit | None = None
    load: float = field(default=0.0, compare=False)
    sizing: Sizing | None = field(default=None, compare=False)


def counted(number: int, noun: str = "replica") -> str:
    """Return the number with its noun, for messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
