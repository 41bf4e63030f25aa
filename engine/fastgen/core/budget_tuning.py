"""Chooses the token budget from measured step times.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.1: throughput rises steeply with the tokens of a step while memory
bandwidth for the weights is the bottleneck, then saturates when arithmetic is. Beyond that point more tokens only add
latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

# The share of the peak throughput that the budget must reach.
PEAK_SHARE = 0.95
_FINE, _COARSE, _COARSE_FROM = 16, 64, 256


@dataclass(frozen=True, slots=True)
class StepTime:
    """A measured step: `seconds` for `tokens` tokens over `kv_tokens` tokens of KV."""

    tokens: int
    kv_tokens: int
    seconds: float

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TunedBudget:
    """A token budget and how it was found.

    Attributes:
        token_budget: tokens per step.
        seconds: predicted time of a step of that size.
        throughput: predicted tokens per second in such steps.
        peak: highest tokens per second on the curve.
        bound: what determined the budget: "peak throughput", "inter-token target", "fewest tokens" or "most tokens".
    """

    token_budget: int
    seconds: float
    throughput: float
    peak: float
    bound: str


def monotone_curve(points: Iterable[StepTime]) -> list[StepTime]:
    """Return the points by size, with noise removed.

    Noise only adds time, and fewer tokens never take longer.
    """
    curve: list[StepTime] = []
    for point in sorted(points, key=lambda p: (-p.tokens, p.seconds)):
        if curve and curve[-1].tokens == point.tokens:
            continue
        limit = curve[-1].seconds if curve else point.seconds
        curve.append(replace(point, seconds=min(point.seconds, limit)))
    curve.reverse()
    return curve


def tune_budget(points: Sequence[StepTime], *, target_seconds: float | None, minimum: int, maximum: int) -> TunedBudget:
    """Return the smallest token budget that reaches 95 % of peak throughput within the limits.

    Args:
        points: measured steps of several sizes, in any order.
        target_seconds: upper bound for the time of a step, or None.
        minimum: smallest budget, which overrides the target: every decoding sequence takes one token of each step.
        maximum: largest budget.
    """
    curve = monotone_curve(points)
    assert curve, "no step was measured"
    peak = max(point.throughput for point in curve)
    budget, bound = _round_up(_fewest_reaching(PEAK_SHARE * peak, curve)), "peak throughput"
    if target_seconds is not None and _seconds(budget, curve) > target_seconds:
        budget, bound = _round_down(_most_within(target_seconds, curve)), "inter-token target"
    limited = min(max(budget, minimum), maximum)
    if limited != budget:
        bound = "fewest tokens" if limited == minimum else "most tokens"
    seconds = _seconds(limited, curve)
    return TunedBudget(limited, seconds, limited / seconds, peak, bound)


def _seconds(tokens: float, curve: Sequence[StepTime]) -> float:
    """Interpolate the curve linearly.

    The curve is extrapolated beyond its last point and constant before its first.
    """
    if len(curve) == 1 or tokens <= curve[0].tokens:
        return curve[0].seconds
    left, right = next((pair for pair in pairwise(curve) if tokens <= pair[1].tokens), (curve[-2], curve[-1]))
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    return left.seconds + slope * (tokens - left.tokens)


def _fewest_reaching(throughput: float, curve: Sequence[StepTime]) -> float:
    """Return the fewest tokens at which the curve reaches `throughput`, which some point does."""
    first = next(index for index, point in enumerate(curve) if point.throughput >= throughput)
    if first == 0:
        return curve[0].tokens
    # Between two points seconds = s + m (n - l), and n / seconds = T where n = T (s - m l) / (1 - T m). The left point
    # is below T and the right one is not, so n lies between them.
    left, right = curve[first - 1], curve[first]
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    at_zero = left.seconds - slope * left.tokens
    return throughput * at_zero / (1 - throughput * slope)


def _most_within(seconds: float, curve: Sequence[StepTime]) -> float:
    """Return the most tokens whose step takes at most `seconds`; 0 if even the smallest takes longer."""
    within = 0.0
    for left, right in pairwise(curve):
        if left.seconds > seconds:
            break
        rise = right.seconds - left.seconds
        share = 1.0 if rise <= 0 else min(1.0, (seconds - left.seconds) / rise)
        within = left.tokens + share * (right.tokens - left.tokens)
    if curve[-1].seconds <= seconds:
        within = curve[-1].tokens
    return within


def _round_up(tokens: float) -> int:
    multiple = _FINE if tokens <= _COARSE_FROM else _COARSE
    return -(-round(tokens) // multiple) * multiple


def _round_down(tokens: float) -> int:
    multiple = _FINE if tokens < _COARSE_FROM else _COARSE
    return int(tokens + 1e-6) // multiple * multiple  # 79.9999999 from a division counts as 80
