"""Predicts step times from observed steps: seconds = a + b * tokens + c * kv_tokens.

a is the fixed cost of a step (reading the weights), b the cost of a token, c the cost of reading a token's KV.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Protocol

from fastgen.core.budget_tuning import StepTime

Vector = tuple[float, float, float]


class StepTimes(Protocol):
    """Predictions of step times."""

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Return the time of a step of `tokens` tokens over `kv_tokens` tokens of KV; 0 if unknown."""

    def tokens_within(self, seconds: float, kv_tokens: int) -> int:
        """Return the most tokens that a step can compute in `seconds`; sys.maxsize if unknown."""


# Scale the columns to about 1, so that the ridge below affects them equally.
_SCALES: Vector = (1.0, 1 / 256, 1 / 65536)
# Weight of a bucket's earlier steps when one is added: it averages over about 64 steps.
_FADE = 1 - 1 / 64
# Keeps the equations solvable if all steps are alike; too small to matter otherwise.
_RIDGE = 1e-7
# Outliers are clipped to this multiple of the expected time.
_OUTLIER = 4.0
_MIN_STEPS = 8
_STEPS_PER_FIT = 16


class StepModel:
    """Online least squares on relative errors, with forgetting and non-negative coefficients.

    Steps are bucketed by tokens, in powers of two, and a bucket forgets only when it gets new steps. So an hour of
    decoding does not wash out the times of full steps, as recursive least squares with one forgetting factor would.
    Deterministic: the same steps give the same fit.

    Attributes:
        coefficients: (a, b, c) of the latest fit, in seconds; zeros before the first fit.
    """

    def __init__(self) -> None:
        self.coefficients: Vector = (0.0, 0.0, 0.0)
        # By bucket, weighted sums over its steps x = (1, tokens, kv_tokens) and times y, relative to y: x x' and x y.
        self._buckets: dict[int, list[float]] = {}
        self._num_observed = 0

    @classmethod
    def of(cls, points: Iterable[StepTime]) -> StepModel:
        """Return a model that has observed `points`."""
        model = cls()
        for point in points:
            model.observe(point.tokens, point.kv_tokens, point.seconds)
        return model

    def observe(self, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Record a step. A time of 0 is ignored: the step was not measured."""
        if seconds <= 0:
            return
        expected = self.seconds(tokens, kv_tokens)
        if expected > 0:
            seconds = min(seconds, _OUTLIER * expected)
        x = (_SCALES[0] / seconds, tokens * _SCALES[1] / seconds, kv_tokens * _SCALES[2] / seconds)
        sums = self._buckets.get(tokens.bit_length(), [0.0] * 12)
        added = [a * b for a in x for b in x] + [*x]
        self._buckets[tokens.bit_length()] = [_FADE * old + new for old, new in zip(sums, added, strict=True)]
        self._num_observed += 1
        if self._num_observed < 4 * _STEPS_PER_FIT or self._num_observed % _STEPS_PER_FIT == 0:
            self._fit()

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Return the time of a step of `tokens` tokens over `kv_tokens` tokens of KV; 0 if unknown."""
        a, b, c = self.coefficients
        return a + b * tokens + c * kv_tokens

    def tokens_within(self, seconds: float, kv_tokens: int) -> int:
        """Return the most tokens that a step can compute in `seconds`; sys.maxsize if unknown."""
        a, b, c = self.coefficients
        if b <= 0:
            return sys.maxsize
        return max(0, int((seconds - a - c * kv_tokens) / b + 1e-9))

    def _fit(self) -> None:
        if self._num_observed < _MIN_STEPS:
            return
        totals = [sum(parts) for parts in zip(*self._buckets.values(), strict=True)]
        xx, xy = totals[:9], totals[9:]
        if len(self._buckets) == 1:
            # Steps of one size cannot separate a from b. Attributing all to b overestimates larger steps and
            # underestimates smaller ones, so the chunker produces steps of other sizes, and they separate the two.
            self.coefficients = (0.0, xy[1] / xx[4] * _SCALES[1], 0.0)
            return
        for i in range(3):
            xx[4 * i] += _RIDGE * (1 + xx[0])
        solution = non_negative_least_squares(xx, xy)
        a, b, c = (solution[i] * _SCALES[i] for i in range(3))
        self.coefficients = (a, b, c)


def non_negative_least_squares(xx: list[float], xy: list[float]) -> Vector:
    """Return the x >= 0 in R^3 that minimises x' xx x - 2 xy' x.

    `xx` is positive definite [3 x 3, row-major]. Solves the system for each of the seven sets of non-zero coefficients;
    one of them has the minimum.
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
            break  # the unconstrained minimum satisfies the constraints
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve by Gaussian elimination. The matrix is positive definite, so no pivoting is needed."""
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
