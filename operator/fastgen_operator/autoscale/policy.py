"""The autoscaling policy of a resource, in the autoscaler's units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.api.autoscaling import Autoscaling, LearningMode

# Ratio of the scale-down to the scale-up utilization: 65 % at a target of 70 %. It only covers the noise of the average
# demand; the scale-down window prevents flapping.
HYSTERESIS: Final = 0.93
# Target utilization while it cannot be derived.
DEFAULT_UTILIZATION: Final = 0.85
# Inter-token target of engines whose own one is not a number of milliseconds.
DEFAULT_INTER_TOKEN_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of one fleet. Times in seconds.

    Attributes:
        min_replicas, max_replicas: bounds. `rules/scale_to_zero.py` handles a lower bound of 0.
        schedule: the schedule that has raised `min_replicas`, in words; empty if none has.
        learned: why the load of the past has raised `min_replicas`, in words; empty if it has not.
        learning: whether a lower bound that the past requires is applied, only shown, or not learned.
        attainment: target share of requests in time, 0 to 1. Only such a bound depends on it.
        idle_seconds: time without a request after which the last replica is removed.
        first_token_seconds, inter_token_seconds: latency targets.
        utilization: target utilization of a replica, 0 to 1; the fleet grows above it.
        derives_utilization: whether `utilization` only applies until it can be derived from a measured capacity.
        up_window: stabilization window for scaling up.
        down_window: stabilization window for scaling down.
        max_step: maximum share of the fleet to remove in one step, 0 to 1. One replica can always be removed.
        max_sequences: maximum number of sequences that one replica runs.
        scrape_seconds: scrape interval.
    """

    min_replicas: int
    max_replicas: int
    schedule: str = ""
    learned: str = ""
    learning: LearningMode = "Advise"
    attainment: float = 0.99
    idle_seconds: float = 600.0
    first_token_seconds: float = 1.0
    inter_token_seconds: float = DEFAULT_INTER_TOKEN_SECONDS
    utilization: float = DEFAULT_UTILIZATION
    derives_utilization: bool = False
    up_window: float = 0.0
    down_window: float = 300.0
    max_step: float = 0.25
    max_sequences: int = 256
    scrape_seconds: float = 5.0

    def __post_init__(self) -> None:
        assert 0 <= self.min_replicas <= self.max_replicas
        assert self.max_replicas >= 1
        assert 0 < self.utilization <= 1

    @property
    def down_utilization(self) -> float:
        """Maximum utilization after a scale-down."""
        return self.utilization * HYSTERESIS

    @property
    def awake(self) -> Policy:
        """The same policy with at least one replica."""
        return replace(self, min_replicas=max(1, self.min_replicas))

    def raised(self, replicas: int, *, schedule: str = "", learned: str = "") -> Policy:
        """Return the policy with another lower bound, and what has set it."""
        return replace(self, min_replicas=replicas, schedule=schedule, learned=learned)

    def within_bounds(self, replicas: int) -> int:
        """Return `replicas` clamped to the bounds."""
        return min(self.max_replicas, max(self.min_replicas, replicas))


def policy_of(spec: Spec, replicas: int, scrape_seconds: float) -> Policy:
    """Return the policy of a spec; without spec.autoscaling, both bounds are `replicas`, at least 1."""
    autoscaling = spec.autoscaling or Autoscaling(min_replicas=max(1, replicas), max_replicas=max(1, replicas))
    target = autoscaling.targets.inter_token_latency_milliseconds or spec.engine.inter_token_target
    percent = autoscaling.targets.utilization_percent
    return Policy(
        min_replicas=autoscaling.min_replicas,
        max_replicas=autoscaling.max_replicas,
        idle_seconds=autoscaling.idle_seconds,
        first_token_seconds=autoscaling.targets.time_to_first_token_milliseconds / 1000,
        inter_token_seconds=target / 1000 if isinstance(target, int) else DEFAULT_INTER_TOKEN_SECONDS,
        utilization=DEFAULT_UTILIZATION if percent is None else percent / 100,
        derives_utilization=percent is None,
        up_window=autoscaling.scale_up.stabilization_seconds,
        down_window=autoscaling.scale_down.stabilization_seconds,
        max_step=autoscaling.scale_down.max_step_percent / 100,
        max_sequences=spec.engine.max_sequences or 256,
        scrape_seconds=scrape_seconds,
        learning=autoscaling.learning,
        attainment=autoscaling.targets.attainment_percent / 100,
    )
