"""What the autoscaler decided, and why, in words that stay the same while the decision does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from fastgen_operator.autoscale.capacity import Capacity

# Reasons of a change of replicas, for programs.
DEMAND_GREW: Final = "DemandGrew"
DEMAND_JUMPED: Final = "DemandJumped"
BACKLOG_TOO_LONG: Final = "BacklogTooLong"
KV_CACHE_FULL: Final = "KVCacheFull"
DEMAND_FELL: Final = "DemandFell"
BOUNDS_CHANGED: Final = "BoundsChanged"

# Reasons why nothing can be decided.
NO_READY_REPLICAS: Final = "NoReadyReplicas"
NO_METRICS: Final = "NoMetrics"
METRICS_STALE: Final = "MetricsStale"
CAPACITY_UNKNOWN: Final = "CapacityUnknown"
HOLD_AFTER_RESTART: Final = "HoldAfterRestart"

# What keeps the fleet from the size that the load asks for.
TOO_MANY_REPLICAS: Final = "TooManyReplicas"
TOO_FEW_REPLICAS: Final = "TooFewReplicas"
RATE_LIMITED: Final = "RateLimited"


@dataclass(frozen=True, slots=True)
class Change:
    """Why the fleet has the size that it has: the last change since the autoscaler began to watch it."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Why the fleet stays as it is whatever its load may be."""

    reason: Literal["NoReadyReplicas", "NoMetrics", "MetricsStale", "CapacityUnknown", "HoldAfterRestart"]
    message: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Why the fleet is not as large, or as small, as its load asks for."""

    reason: Literal["TooManyReplicas", "TooFewReplicas", "RateLimited"]
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. Two are equal where a visit to the resource would find nothing new.

    Attributes:
        replicas: how many there are to be.
        change: why; None where the autoscaler has not changed anything yet.
        hold: why it is not a decision about the load; None where it is.
        limit: what it is limited by; None where the load alone decided.
        capacity: of one replica; None while unknown. It moves a little all the time.
        load: replicas that the demand would keep wholly busy; for the metrics.
    """

    replicas: int
    change: Change | None = None
    hold: Hold | None = None
    limit: Limit | None = None
    capacity: Capacity | None = field(default=None, compare=False)
    load: float = field(default=0.0, compare=False)
