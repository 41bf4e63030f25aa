"""Estimate the capacity of replicas in forward tokens per second. Pure.

The capacity is what a replica computes within the inter-token target. In the steady state of Dynamic SplitFuse, each
step processes one token of each of N decoding sequences, and prompt tokens at the rate at which sequences arrive and
finish. A request contributes I prompt tokens over O steps, so a step has N (1 + I/O) forward tokens and N (P + O/2)
resident KV tokens, where P also includes the prompt tokens from the prefix cache. A prompt token is computed over a
context from earlier steps: on average P - I tokens, and half of the tokens by which I exceeds a step. The step time,
a + b · tokens + c · resident tokens + d · prompt tokens · context, is linear in N. The largest N within all bounds
gives the capacity. All lengths are means, so a few very long prompts among short ones take more time than this says.

A replica far below the median is a straggler. The fleet is sized with the median of the other replicas' estimates, so
that one slow replica does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_high
from typing import Final, Literal

from fastgen_operator.autoscale.measure.averages import Average
from fastgen_operator.autoscale.measure.rates import ReplicaLoad, RequestShape
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.sample import Sample

# Target utilization of the KV cache. Above it, preemptions become likely.
KV_SHARE: Final = 0.80

# If the inter-token target allows fewer forward tokens per step than this, no number of replicas meets it.
_LEAST_TOKENS: Final = 16
# Time constant of the averages: the step model changes a little with every step.
_SECONDS: Final = 60.0
# How long a throughput that was measured under a backlog applies.
_THROUGHPUT_EXPIRY: Final = 600.0
# A replica becomes a straggler below one share of the median, and recovers above the other.
_STRAGGLES_BELOW: Final = 0.5
_RECOVERS_ABOVE: Final = 0.6


@dataclass(frozen=True, slots=True)
class MeasuredCapacity:
    """Capacity of one replica.

    Attributes:
        tokens_per_second: forward tokens per second.
        token_budget: maximum forward tokens per step.
        source: StepModel (the engines' step-time model) or Throughput (measured while a backlog existed).
    """

    tokens_per_second: float
    token_budget: int
    source: Literal["StepModel", "Throughput"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A replica that is much slower than others; `share` is its speed relative to the median."""

    pod: str
    share: float = field(compare=False)


def modelled(sample: Sample, shape: RequestShape, inter_token_seconds: float, max_sequences: int) -> float | None:
    """Return the forward tokens per second that a step model implies; None until it is fitted.

    The inter-token target is ignored if no step can meet it, because more replicas would not help.
    """
    a, b, c, d = sample.step_model
    # From steps of equal size, the engine cannot tell a from b. It reports a = c = 0, which underrates larger steps.
    if b <= 0 or a + c <= 0 or sample.token_budget < 1:
        return None
    generated = max(1.0, shape.generated)
    tokens = 1 + shape.computed / generated
    resident = shape.prompt + generated / 2
    bounds = [sample.token_budget / tokens, float(max_sequences)]
    if sample.kv_capacity_tokens > 0:
        bounds.append(max(1.0, KV_SHARE * sample.kv_capacity_tokens / resident))
    context = shape.prompt - shape.computed + max(0.0, shape.computed - sample.token_budget) / 2
    sequence_seconds = b * tokens + c * resident + d * context * shape.computed / generated
    in_time = (inter_token_seconds - a) / sequence_seconds
    if in_time * tokens >= _LEAST_TOKENS:
        bounds.append(in_time)
    sequences = min(bounds)
    return sequences * tokens / (a + sequences * sequence_seconds)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Estimates of one replica.

    Attributes:
        time: time of its newest sample.
        token_budget: maximum forward tokens per step.
        modelled: average of `modelled`, in tokens per second.
        throughput: average throughput under a backlog, last updated at `throughput_at`.
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

    def capacity(self, now: float) -> MeasuredCapacity | None:
        """Return the modelled capacity, capped by recent throughput under a backlog, if known.

        A throughput of 0 is ignored: a stuck replica does not show its capacity.
        """
        observed = self.throughput.value if now - self.throughput_at < _THROUGHPUT_EXPIRY else 0.0
        known = self.modelled.weight > 0
        if observed > 0 and not (known and self.modelled.value <= observed):
            return MeasuredCapacity(observed, int(self.token_budget), "Throughput")
        return MeasuredCapacity(self.modelled.value, int(self.token_budget), "StepModel") if known else None


@dataclass(frozen=True, slots=True)
class ReplicaSpeeds:
    """The estimates of all replicas.

    Attributes:
        replicas: estimates by pod.
        capacity: median of the replicas that are not stragglers; None while unknown.
        stragglers: slow replicas, the slowest first.
    """

    replicas: Mapping[str, _Speed] = field(default_factory=dict)
    capacity: MeasuredCapacity | None = None
    stragglers: tuple[Straggler, ...] = ()

    def observe(
        self,
        loads: Mapping[str, ReplicaLoad],
        revisions: Mapping[str, str],
        shape: RequestShape,
        policy: Policy,
        now: float,
    ) -> ReplicaSpeeds:
        """Return the estimates of the ready replicas, updated with their newest samples.

        Args:
            revisions: pod template hash by pod. Only replicas of one revision are compared, because another model or
                image has another speed.
        """
        replicas = {pod: self.replicas.get(pod, _Speed()).observe(load, shape, policy) for pod, load in loads.items()}
        found = {pod: speed.capacity(now) for pod, speed in replicas.items()}
        known = {pod: capacity for pod, capacity in found.items() if capacity is not None}
        if not known:
            # The capacity of replicas that are gone is the best estimate for the next ones.
            return ReplicaSpeeds(replicas, self.capacity)
        # The first step models of a replica can be far off.
        warm = {
            pod: capacity.tokens_per_second
            for pod, capacity in known.items()
            if replicas[pod].modelled.is_warm or replicas[pod].throughput.is_warm
        }
        stragglers = _stragglers(warm, revisions, {straggler.pod for straggler in self.stragglers})
        slow = {straggler.pod for straggler in stragglers}
        return ReplicaSpeeds(replicas, _median(c for pod, c in known.items() if pod not in slow), stragglers)

    @property
    def deficit(self) -> float:
        """Capacity that the stragglers lack, in replicas."""
        return sum(1 - straggler.share for straggler in self.stragglers)


def _stragglers(
    speeds: Mapping[str, float], revisions: Mapping[str, str], before: Container[str]
) -> tuple[Straggler, ...]:
    """Return the replicas far below the median of their revision, the slowest first.

    The median of two is the faster one, because no GPU is fast by accident.
    """
    by_revision: dict[str, list[float]] = {}
    for pod, speed in speeds.items():
        by_revision.setdefault(revisions.get(pod, ""), []).append(speed)
    medians = {revision: median_high(alike) for revision, alike in by_revision.items()}
    shares = ((speed / medians[revisions.get(pod, "")], pod) for pod, speed in speeds.items())
    slow = ((share, pod) for share, pod in shares if share < (_RECOVERS_ABOVE if pod in before else _STRAGGLES_BELOW))
    return tuple(Straggler(pod, share) for share, pod in sorted(slow))


def _median(found: Iterable[MeasuredCapacity]) -> MeasuredCapacity:
    by_speed = sorted(found, key=lambda capacity: capacity.tokens_per_second)
    middle = by_speed[(len(by_speed) - 1) // 2]
    speed = median(capacity.tokens_per_second for capacity in by_speed)
    return replace(middle, tokens_per_second=speed)
