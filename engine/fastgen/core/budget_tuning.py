"""Where a pass stops getting more for its time: the token budget from measured step times.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.1: throughput against the tokens of a pass rises steeply while the
weights' bandwidth bounds it, then saturates as arithmetic does. Beyond that knee more tokens add latency and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

# The share of the peak throughput that is enough.
ENOUGH = 0.95
_FINE, _COARSE, _COARSE_FROM = 16, 64, 256


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a pass took: `tokens` forward tokens over `kv_tokens` of resident KV."""

    tokens: int
    kv_tokens: int
    seconds: float

    @property
    def throughput(self) -> float:
        """Forward tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TunedBudget:
    """A token budget and why it is that.

    Attributes:
        token_budget: forward tokens per pass.
        seconds: how long a pass of them takes, by the curve.
        throughput: forward tokens per second in passes of them.
        peak: the most tokens per second of any pass on the curve.
        bound: what set it: the knee of the curve, the inter-token target, or the fewest tokens allowed.
    """

    token_budget: int
    seconds: float
    throughput: float
    peak: float
    bound: str


def repaired(points: Iterable[StepTime]) -> list[StepTime]:
    """The points by size, with noise taken out: noise only ever adds time, and fewer tokens never take longer."""
    best: list[StepTime] = []
    for point in sorted(points, key=lambda p: (-p.tokens, p.seconds)):
        if best and best[-1].tokens == point.tokens:
            continue
        limit = best[-1].seconds if best else point.seconds
        best.append(replace(point, seconds=min(point.seconds, limit)))
    best.reverse()
    return best


def tune_budget(
    points: Sequence[StepTime], *, target_seconds: float | None, at_least: int, at_most: int
) -> TunedBudget:
    """The fewest tokens per pass that reach 95 % of the peak throughput, within limits.

    Args:
        points: measured passes of several sizes, in any order.
        target_seconds: a pass takes no longer than this, where given.
        at_least: fewest tokens, whatever the curve says: every running sequence takes one of each pass.
        at_most: most tokens.
    """
    curve = repaired(points)
    assert curve, "a curve has points"
    peak = max(point.throughput for point in curve)
    budget, bound = _round_up(_fewest_reaching(ENOUGH * peak, curve)), "knee"
    if target_seconds is not None and _seconds(budget, curve) > target_seconds:
        budget, bound = _round_down(_most_within(target_seconds, curve)), "inter-token target"
    limited = min(max(budget, at_least), at_most)
    if limited != budget:
        bound = "fewest tokens" if limited == at_least else "most tokens"
    seconds = _seconds(limited, curve)
    return TunedBudget(limited, seconds, limited / seconds, peak, bound)


def _seconds(tokens: float, curve: Sequence[StepTime]) -> float:
    """The curve at any size: straight lines between its points, and on from its ends."""
    if len(curve) == 1 or tokens <= curve[0].tokens:
        return curve[0].seconds
    left, right = next((pair for pair in pairwise(curve) if tokens <= pair[1].tokens), (curve[-2], curve[-1]))
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    return left.seconds + slope * (tokens - left.tokens)


def _fewest_reaching(throughput: float, curve: Sequence[StepTime]) -> float:
    """The first place along the curve where tokens / seconds reaches `throughput`; some point is known to."""
    first = next(index for index, point in enumerate(curve) if point.throughput >= throughput)
    if first == 0:
        return curve[0].tokens
    # Between two points seconds = s + m (n - l), and n / seconds = T where n = T (s - m l) / (1 - T m). The left point
    # is below T and the right one is not, so that n lies between them.
    left, right = curve[first - 1], curve[first]
    slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
    at_zero = left.seconds - slope * left.tokens
    return throughput * at_zero / (1 - throughput * slope)


def _most_within(seconds: float, curve: Sequence[StepTime]) -> float:
    """The most tokens whose pass takes no longer than this; 0 where none does."""
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
    return int(tokens + 1e-6) // multiple * multiple  # 79.9999999 out of a division is 80
