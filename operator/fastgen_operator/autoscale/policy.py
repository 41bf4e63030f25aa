"""What the user asked of autoscaling, in the units that the decision is made in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Scale-down begins this far below the utilization that scale-up begins at: 85 and 70 percent, unless asked otherwise.
HYSTERESIS: Final = 0.70 / 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules of one fleet. Times in seconds.

    Attributes:
        min_replicas, max_replicas: the bounds.
        first_token_seconds, inter_token_seconds: the latency targets.
        utilization: the share of a replica's capacity above which the fleet grows.
        up_window: a scale-up must have been wanted for this long.
        down_window: a scale-down considers the highest load of this long.
        max_step: the share of the fleet that one scale-down may take, at least one replica.
        max_sequences: sequences that one replica runs at a time.
        scrape_seconds: how often the replicas are looked at.
    """

    min_replicas: int
    max_replicas: int
    first_token_seconds: float = 1.0
    inter_token_seconds: float = 0.05
    utilization: float = 0.85
    up_window: float = 0.0
    down_window: float = 300.0
    max_step: float = 0.25
    max_sequences: int = 256
    scrape_seconds: float = 5.0

    def __post_init__(self) -> None:
        assert 1 <= self.min_replicas <= self.max_replicas
        assert 0 < self.utilization <= 1

    @property
    def down_utilization(self) -> float:
        """The share of a replica's capacity that the fleet may be filled to by a scale-down."""
        return self.utilization * HYSTERESIS

    def within_bounds(self, replicas: int) -> int:
        """The nearest number of replicas that is allowed."""
        return min(self.max_replicas, max(self.min_replicas, replicas))
