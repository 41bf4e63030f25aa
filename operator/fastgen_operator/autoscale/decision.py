"""The autoscaler's decision and its reasons. Equal decisions have equal messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Change:
    """Reason and message of a change of the number of replicas."""

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
        "FloorLearned",
        "RequestsHeld",
        "Idle",
    ]
    message: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Why the number of replicas is held: measurements are missing, stale, or too recent for a scale-down."""

    reason: Literal[
        "NoReadyReplicas", "NoMetrics", "MetricsStale", "CapacityUnknown", "HoldAfterRestart", "GatewayUnreachable"
    ]
    message: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Why the fleet is smaller or larger than the load requires."""

    reason: Literal["VolumeOnOneNode", "TooManyReplicas", "TooFewReplicas", "RateLimited"]
    message: str


# Changes of the demand that the status shows: relative, and in replicas (for idle fleets). Both must be exceeded.
_MOVED: Final = 0.3
_MOVED_REPLICAS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Sizing:
    """The arithmetic of a decision by demand.

    Attributes:
        demand: arriving forward tokens per second.
        capacity: forward tokens per second that a replica computes within the latency targets.
        utilization: target share of the capacity.
        missing: additional replicas for failing and lost pods, and for the capacity that stragglers lack.
        is_warm: whether the demand was measured for long enough to replace the one in the status.
    """

    demand: float
    capacity: float
    utilization: float
    missing: float
    is_warm: bool = True

    @property
    def required(self) -> float:
        """Replicas that the demand requires, not rounded, without `missing`."""
        return self.demand / (self.capacity * self.utilization)

    def differs(self, told: float | None) -> bool:
        """Return whether the demand should replace `told`, the one in the status.

        The first intervals after a restart of the operator are noise and replace nothing.
        """
        if told is None:
            return True
        return self.is_warm and abs(self.demand - told) > max(_MOVED * told, _MOVED_REPLICAS * self.capacity)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Equal decisions need no reconcile.

    Attributes:
        replicas: desired replicas.
        change: why the number was last changed; None if it has not changed since the operator started.
        hold: set if the number is held although the load may require another.
        limit: set if a bound, a rate limit or a full node overrides the load.
        sizing: the arithmetic; None while demand or capacity are unknown. It fluctuates, so it is not compared.
    """

    replicas: int
    change: Change | None = None
    hold: Hold | None = None
    limit: Limit | None = None
    sizing: Sizing | None = field(default=None, compare=False)

    @property
    def load(self) -> float | None:
        """Demand in fully utilized replicas; None while demand or capacity are unknown.

        0 for a fleet that was scaled to 0 replicas: the gateway holds no request.
        """
        if self.sizing is not None:
            return self.sizing.demand / self.sizing.capacity
        return None if self.replicas or self.hold is not None else 0.0


def counted(number: int, noun: str = "replica") -> str:
    """Return the number with its noun, for messages."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
