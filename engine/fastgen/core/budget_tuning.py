"""Chooses the token budget from measured step times.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.1: throughput rises steeply with the tokens of a step while memory
bandwidth for the weights is the bottleneck, then saturates when arithmetic is. Beyond that point more tokens only add
latency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fastgen.core.step_times import StepTime

# The share of the peak throughput that the budget must reach.
PEAK_SHARE = 0.95
# Tolerance of comparisons of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TunedBudget:
    """A token budget and how it was found.

    Attributes:
        token_budget: tokens per step.
        seconds: predicted time of a step of that size.
        throughput: predicted tokens per second in such steps.
        peak: highest tokens per second on the curve.
        bound: what determined the budget: "peak throughput", "inter-token target", "lower limit" or "upper limit".
    """

    token_budget: int
    seconds: float
    throughput: float
    peak: float
    bound: str


def measured_sizes(most_tokens: int) -> list[int]:
    """Return the step sizes to measure: 16, 32, 48, 64, 96, 128, 192 and so on, `most_tokens` last."""
    sizes = {most_tokens}
    power = 16
    while power < most_tokens:
        sizes |= {power, power * 3 // 2} if power > 16 else {power}
        power *= 2
    return sorted(size for size in sizes if size <= most_tokens)


def monotone_curve(points: Iterable[StepTime]) -> list[StepTime]:
    """Return one point for each size, by ascending size, with noise removed.

    Noise only adds time: of several points of a size the fastest counts, and fewer tokens never take longer than more.
    """
    curve: list[StepTime] = []
    for point in sorted(points, key=lambda p: (-p.tokens, p.seconds)):
        if curve and curve[-1].tokens == point.tokens:
            continue
        limit = curve[-1].seconds if curve else point.seconds
        curve.append(point._replace(seconds=min(point.seconds, limit)))
    curve.reverse()
    return curve


def tune_budget(points: Sequence[StepTime], *, target_seconds: float | None, minimum: int, maximum: int) -> TunedBudget:
    """Return the smallest token budget with 95 % of peak throughput, or what the limits allow.

    Args:
        points: measured steps of several sizes, in any order.
        target_seconds: longest time of a step; None for no limit.
        minimum, maximum: limits of the budget. The minimum overrides the target: every decoding sequence takes one
            token of each step.
    """
    curve = monotone_curve(points)
    assert curve, "no step was measured"
    peak = max(point.throughput for point in curve)
    budgets = _budgets(curve[-1].tokens)
    reaching = (tokens for tokens in budgets if tokens >= (1 - _ROUNDING) * PEAK_SHARE * peak * _seconds(tokens, curve))
    budget, bound = next(reaching, budgets[-1]), "peak throughput"
    if target_seconds is not None and _seconds(budget, curve) > target_seconds:
        limit = (1 + _ROUNDING) * target_seconds
        within = (tokens for tokens in budgets if _seconds(tokens, curve) <= limit)
        budget, bound = max(within, default=0), "inter-token target"
    limited = min(max(budget, minimum), maximum)
    if limited != budget:
        bound = "lower limit" if limited == minimum else "upper limit"
    seconds = _seconds(limited, curve)
    return TunedBudget(limited, seconds, limited / seconds, peak, bound)


def _budgets(most_tokens: int) -> list[int]:
    """Return the budgets to choose from, ascending; the last is at least `most_tokens`.

    They are multiples of 16 up to 256, and of 64 above.
    """
    return [*range(16, 256, 16), *range(256, most_tokens + 64, 64)]


def _seconds(tokens: int, curve: Sequence[StepTime]) -> float:
    """Return the time of a step of `tokens` tokens, interpolated linearly.

    The curve is extrapolated beyond its last point and constant before its first.
    """
    if len(curve) == 1 or tokens <= curve[0].tokens:
        return curve[0].seconds
    left, right = next((pair for pair in pairwise(curve) if tokens <= pair[1].tokens), (curve[-2], curve[-1]))
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    return left.seconds + slope * (tokens - left.tokens)
