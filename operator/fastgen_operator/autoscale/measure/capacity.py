"""Estimate the capacity of the replicas. Pure.

It is in forward tokens per second within the inter-token target. In the steady state of Dynamic SplitFuse, each step
processes one token of each of N decoding sequences, and prompt tokens at the rate at which sequences arrive and finish.
A request contributes I prompt tokens over O steps, so a step has N (1 + I/O) forward tokens and N (P + O/2) resident KV
tokens, where P also includes the prompt tokens from the prefix cache. The step time, a + b · tokens + c · resident
tokens, is linear in N. The largest N within all bounds gives the capacity.

Each replica has its own estimate. The fleet's is their median, so that one slow replica does not change it. A replica
far below the median is a straggler: see `ReplicaSpeeds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_high
from typing import Final, Literal

from fastgen_operator.autoscale.measure.averages import Average
from fastgen_operator.autoscale.measure.rates import ReplicaLoad, RequestShape
from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.autoscale.policy import Policy

# Target utilization of the KV cache. Above it, preemptions become likely.
KV_SHARE: Final = 0.80

# If the target leaves fewer forward tokens per step than this, no number of replicas meets it.
_LEAST_TOKENS: Final = 16
# Time constant of both averages: the fit of the step times changes a little with every step.
_SECONDS: Final = 60.0
# A throughput seen under a backlog applies for this long.
_THROUGHPUT_EXPIRY: Final = 600.0
# A replica is a straggler below this share of the median, and until it is above the other one again.
_STRAGGLES_BELOW: Final = 0.5
_RECOVERS_ABOVE: Final = 0.6
# Weight from which an average judges a replica: its first fits can be far off.
_JUDGED: Final = 1 - math.exp(-1.0) - 1e-9

Source = Literal["StepModel", "Throughput"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one replica.

    Attributes:
        tokens_per_second: forward tokens per second.
        token_budget: maximum forward tokens per step.
        source: StepModel (the engines' step-time model) or Throughput (measured while a backlog existed).
    """

    tokens_per_second: float
    token_budget: int
    source: Source


@dataclass(frozen=True, slots=True)
class Straggler:
    """A replica that is much slower than the others; `share` is its speed relative to their median."""

    pod: str
    share: float = field(compare=False)


def modelled(sample: Sample, shape: RequestShape, inter_token_seconds: float, max_sequences: int) -> float | None:
    """Return the forward tokens per second according to the replica's step model.

    None until the model is fitted. The inter-token target is ignored if no step can meet it: more replicas would not
    help.
    """
    a, b, c = sample.step_model
    # Steps of equal size cannot separate a from b: the engine then reports a = c = 0, which underrates larger steps.
    if b <= 0 or a + c <= 0 or sample.token_budget < 1:
        return None
    generated = max(1.0, shape.generated)
    tokens = 1 + shape.computed / generated
    resident = shape.prompt + generated / 2
    bounds = [sample.token_budget / tokens, float(max_sequences)]
    if sample.kv_capacity_tokens > 0:
        bounds.append(max(1.0, KV_SHARE * sample.kv_capacity_tokens / resident))
    sequence_seconds = b * tokens + c * resident
    in_time = (inter_token_seconds - a) / sequence_seconds
    if in_time * tokens >= _LEAST_TOKENS:
        bounds.append(in_time)
    sequences = min(bounds)
    return sequences * tokens / (a + sequences * sequence_seconds)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Estimates of one replica.

    Attributes:
        time: of its newest sample.
        token_budget: maximum forward tokens per step.
        modelled: average of `modelled`, in tokens per second.
        throughput: average throughput under a backlog; `throughput_at`: time of its last update.
    """

    time: float = -math.inf
    token_budget: float = 0.0
    modelled: Average = field(default_factory=lambda: Average(_SECONDS))
    throughput: Average = field(default_factory=lambda: Average(_SECONDS))
    throughput_at: float = -math.inf

    def observe(self, load: ReplicaLoad, shape: RequestShape, policy: Policy) -> _Speed:
        sample, rates = load.sample, load.rates
        if sample.time <= self.time:
            return self
        average, throughput, throughput_at = self.modelled, self.throughput, self.throughput_at
        found = modelled(sample, shape, policy.inter_token_seconds, policy.max_sequences)
        if found is not None:
            average = average.add(found, min(sample.time - self.time, policy.scrape_seconds))
        if rates.backlogged:
            throughput = throughput.add(rates.computed + rates.decoded, rates.seconds)
            throughput_at = sample.time
        return _Speed(sample.time, sample.token_budget, average, throughput, throughput_at)

    @property
    def is_judged(self) -> bool:
        return max(self.modelled.weight, self.throughput.weight) >= _JUDGED

    def capacity(self, now: float) -> Capacity | None:
        """Return the modelled capacity, capped by the throughput seen under a backlog; None if unknown.

        A throughput of 0 is ignored: the replica is stuck, which says nothing about its capacity.
        """
        observed = self.throughput.value if now - self.throughput_at < _THROUGHPUT_EXPIRY else 0.0
        known = self.modelled.weight > 0
        if observed > 0 and not (known and self.modelled.value <= observed):
            return Capacity(observed, int(self.token_budget), "Throughput")
        return Capacity(self.modelled.value, int(self.token_budget), "StepModel") if known else None


@dataclass(frozen=True, slots=True)
class ReplicaSpeeds:
    """The estimates of all replicas.

    Attributes:
        replicas: by pod.
        capacity: the median of the replicas that are no stragglers; None while unknown.
        stragglers: the slowest first.
    """

    replicas: Mapping[str, _Speed] = field(default_factory=dict)
    capacity: Capacity | None = None
    stragglers: tuple[Straggler, ...] = ()

    def observe(
        self,
        loads: Mapping[str, ReplicaLoad],
        revisions: Mapping[str, str],
        shape: RequestShape,
        policy: Policy,
        now: float,
    ) -> ReplicaSpeeds:
        """Return the estimates updated with the newest sample of each ready replica; others are dropped.

        Args:
            revisions: hash of each pod's template. Only replicas of the same one are compared: another model or image
                has another speed.
        """
        replicas = {pod: self.replicas.get(pod, _Speed()).observe(load, shape, policy) for pod, load in loads.items()}
        found = {pod: speed.capacity(now) for pod, speed in replicas.items()}
        known = {pod: capacity for pod, capacity in found.items() if capacity is not None}
        if not known:
            # What was learned of replicas that are gone still holds for the next ones.
            return ReplicaSpeeds(replicas, self.capacity)
        judged = {pod: known[pod].tokens_per_second for pod in known if replicas[pod].is_judged}
        before = frozenset(straggler.pod for straggler in self.stragglers)
        slow_ones: list[Straggler] = []
        for revision in {revisions.get(pod, "") for pod in judged}:
            alike = {pod: speed for pod, speed in judged.items() if revisions.get(pod, "") == revision}
            slow_ones += _stragglers(alike, before)
        stragglers = tuple(sorted(slow_ones, key=lambda straggler: (straggler.share, straggler.pod)))
        slow = {straggler.pod for straggler in stragglers}
        return ReplicaSpeeds(replicas, _median(c for pod, c in known.items() if pod not in slow), stragglers)

    @property
    def deficit(self) -> float:
        """How many replicas' worth of capacity the stragglers lack."""
        return sum(1 - straggler.share for straggler in self.stragglers)


def _stragglers(speeds: Mapping[str, float], before: frozenset[str]) -> list[Straggler]:
    """Return the replicas far below the median.

    Of two, the faster one is the measure: no GPU is fast by accident.
    """
    if len(speeds) < 2:
        return []
    middle = median_high(speeds.values())
    shares = {pod: speed / middle for pod, speed in speeds.items()}
    return [
        Straggler(pod, share)
        for pod, share in shares.items()
        if share < (_RECOVERS_ABOVE if pod in before else _STRAGGLES_BELOW)
    ]


def _median(found: Iterable[Capacity]) -> Capacity:
    by_speed = sorted(found, key=lambda capacity: capacity.tokens_per_second)
    middle = by_speed[(len(by_speed) - 1) // 2]
    speed = median(capacity.tokens_per_second for capacity in by_speed)
    return replace(middle, tokens_per_second=speed)
