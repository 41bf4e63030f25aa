"""How long passes take, learnt from passes: step = a + b * tokens + c * kv_tokens seconds.

a is what every pass costs (the weights are read), b a forward token, c a token whose KV is read.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Protocol

from fastgen.core.budget_tuning import StepTime

Vector = tuple[float, float, float]


class StepTimes(Protocol):
    """What is known of the time of passes, in seconds."""

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Of a pass of `tokens` forward tokens whose sequences have `kv_tokens` tokens; 0 where nothing is known."""

    def tokens_within(self, seconds: float, kv_tokens: int) -> int:
        """The most forward tokens of a pass that takes `seconds`; sys.maxsize where nothing is known."""


# Columns are scaled to about 1, so that the ridge below weighs them alike.
_SCALES: Vector = (1.0, 1 / 256, 1 / 65536)
# What a bucket remembers: about this many of its latest passes.
_MEMORY = 64
# Keeps the equations solvable where passes do not differ: far below what any difference between passes adds.
_RIDGE = 1e-7
# A pass that took this many times what was expected was disturbed: it counts as no more than that.
_DISTURBED = 4.0
_FEWEST_PASSES = 8
_PASSES_PER_FIT = 16


class _Moments:
    """Sums over passes x = (1, tokens, kv_tokens) and times y, relative to y, the older ones fading."""

    __slots__ = ("xx", "xy")

    def __init__(self) -> None:
        self.xx = [0.0] * 9
        self.xy = [0.0] * 3

    def add(self, x: Vector, y: float) -> None:
        fade = 1 - 1 / _MEMORY
        z = (x[0] / y, x[1] / y, x[2] / y)
        for i in range(3):
            self.xy[i] = self.xy[i] * fade + z[i]
            for j in range(3):
                self.xx[3 * i + j] = self.xx[3 * i + j] * fade + z[i] * z[j]


class StepModel:
    """An online least-squares fit of relative errors, with forgetting and coefficients that are never negative.

    Passes are remembered by size, in buckets of a power of two of tokens, and a bucket forgets only when passes of its
    size come: an hour of decoding does not wash out what a pass of the full budget takes, as it would with plain
    recursive least squares and one forgetting factor. Deterministic: the same passes give the same fit.

    `coefficients`: (a, b, c) of the latest fit, in seconds; zeros until a few passes were seen.
    """

    def __init__(self) -> None:
        self.coefficients: Vector = (0.0, 0.0, 0.0)
        self._buckets: dict[int, _Moments] = {}
        self._num_observed = 0

    @classmethod
    def of(cls, points: Iterable[StepTime]) -> StepModel:
        """A model that has seen these passes."""
        model = cls()
        for point in points:
            model.observe(point.tokens, point.kv_tokens, point.seconds)
        return model

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Takes in a pass. One that took no time at all is passed over: it was not measured."""
        if seconds <= 0:
            return
        expected = self.seconds(tokens, kv_tokens)
        if expected > 0:
            seconds = min(seconds, _DISTURBED * expected)
        x = (_SCALES[0], tokens * _SCALES[1], kv_tokens * _SCALES[2])
        self._buckets.setdefault(tokens.bit_length(), _Moments()).add(x, seconds)
        self._num_observed += 1
        early = self._num_observed < 4 * _PASSES_PER_FIT
        if early or self._num_observed % _PASSES_PER_FIT == 0:
            self._fit()

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Of a pass of `tokens` forward tokens whose sequences have `kv_tokens` tokens; 0 where nothing is known."""
        a, b, c = self.coefficients
        return a + b * tokens + c * kv_tokens

    def tokens_within(self, seconds: float, kv_tokens: int) -> int:
        """The most forward tokens of a pass that takes `seconds`; sys.maxsize where nothing is known."""
        a, b, c = self.coefficients
        if b <= 0:
            return sys.maxsize
        return max(0, int((seconds - a - c * kv_tokens) / b + 1e-9))

    def _fit(self) -> None:
        if self._num_observed < _FEWEST_PASSES:
            return
        xx = [sum(moments.xx[i] for moments in self._buckets.values()) for i in range(9)]
        xy = [sum(moments.xy[i] for moments in self._buckets.values()) for i in range(3)]
        if len(self._buckets) == 1:
            # Passes of one size do not tell a from b. Taking all of it for b overrates large passes and underrates
            # small ones, so whoever shapes passes by it makes others than these, from which the difference is learnt.
            self.coefficients = (0.0, xy[1] / xx[4] * _SCALES[1], 0.0)
            return
        for i in range(3):
            xx[4 * i] += _RIDGE * (1 + xx[0])
        solution = non_negative_least_squares(xx, xy)
        a, b, c = (solution[i] * _SCALES[i] for i in range(3))
        self.coefficients = (a, b, c)


def non_negative_least_squares(xx: list[float], xy: list[float]) -> Vector:
    """The x >= 0 of three that minimises x' xx x - 2 xy' x, where xx [3 x 3, row by row] is positive definite.

    Each set of coefficients that may differ from zero is tried: seven small systems, of which one holds the minimum.
    """
    best, least = (0.0, 0.0, 0.0), 0.0
    for size in (3, 2, 1):
        for free in itertools.combinations(range(3), size):
            found = _solve([[xx[3 * i + j] for j in free] for i in free], [xy[i] for i in free])
            if min(found) < 0:
                continue
            x = [0.0, 0.0, 0.0]
            for i, value in zip(free, found, strict=True):
                x[i] = value
            # At the minimum over a set, x' xx x = xy' x.
            objective = -sum(xy[i] * x[i] for i in range(3))
            if objective < least:
                best, least = (x[0], x[1], x[2]), objective
        if size == 3 and min(best) > 0:
            break  # the minimum without bounds is within them
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is positive definite, so no pivoting is needed."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [below - factor * above for below, above in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
