"""The autoscaler's decision and its reasons. Messages are stable while the decision is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Change:
    """Reason for the current number of replicas: the last change since the autoscaler started."""

    reason: Literal[
        "KVCacheFull",
        "DemandGrew",
        "DemandJumped",
        "BacklogTooLong",
        "ReplicasMissing",
        "DemandFell",
        "BoundsChanged",
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


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Equal decisions need no reconcile.

    Attributes:
        replicas: desired replicas.
        change: reason for this number; None if the autoscaler has not changed it yet.
        hold: set if the number is held regardless of the load.
        limit: set if a bound or rate limit overrides the load.
        load: demand in fully utilized replicas, for the metrics. Fluctuates, so it is not compared.
    """

    replicas: int
    change: Change | None = None
    hold: Hold | None = None
    limit: Limit | None = None
    load: float = field(default=0.0, compare=False)


def counted(replicas: int) -> str:
    """Return the number with its noun, for messages."""
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"
