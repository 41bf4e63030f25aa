"""Fits the coefficients of `fastgen.core.step_times` to observed steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fastgen.core.step_times import StepCoefficients, StepTime, StepWork

# Scale the columns to about 1, so that the ridge below affects them equally.
_SCALES = StepCoefficients(1.0, 1 / 256, 1 / 65536, 1 / 1048576)
_SIZE = len(_SCALES)
_NO_STEPS = [0.0] * (_SIZE * _SIZE + _SIZE + 1)
# Weight of a bucket's earlier steps when one is added: it averages over about 64 steps.
_FADE = 1 - 1 / 64
# Keeps the equations solvable if all steps are alike; too small to matter otherwise.
_RIDGE = 1e-7
# `context_pair` is shrunk to its prior as if all steps had shown the prior over contexts of so many tokens. Longer
# contexts outweigh it. Shorter ones do not: the times of their chunks also differ for other reasons.
_PRIOR_CONTEXT = 100
# Outliers are clipped to this multiple of the expected time, except for the first step of a bucket: the expectation is
# an extrapolation there. If that step was slow for another reason, faster ones soon outweigh it.
_OUTLIER = 4.0
_MIN_STEPS = 8
_STEPS_PER_FIT = 16
# The first steps of a bucket, as many as one fit has, are fitted at once if they take more than this multiple of the
# expected time, or less than its inverse. Not all steps: what the model cannot explain would be fitted in each step.
_DEVIATION = 1.25


class StepModel:
    """Online least squares on relative errors, with forgetting and non-negative coefficients.

    Steps are bucketed by tokens, in powers of two, and by context, in powers of eight. A bucket forgets only when it
    gets new steps. So an hour of decoding does not wash out the times of full steps, nor an hour of short prompts those
    of long contexts, as recursive least squares with one forgetting factor would. Deterministic: the same steps give
    the same fit.

    Attributes:
        coefficients: those of the latest fit; zeros before the first one.
    """

    def __init__(self) -> None:
        self.coefficients = StepCoefficients()
        # By bucket, weighted sums over its steps x = (1, *work) and times y, relative to y: x x' and x y; and of 1.
        self._buckets: dict[tuple[int, int], list[float]] = {}
        self._num_observed = 0
        self._prior = 0.0  # of the coefficient `context_pair`

    @classmethod
    def of(cls, points: Iterable[StepTime]) -> StepModel:
        """Return a model that has observed `points`. They determine the prior."""
        model = cls()
        for point in points:
            model.observe(point.work, point.seconds)
        if model._buckets:
            model._fit()
        model._prior = model.coefficients.context_pair
        return model

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record a step. A time of 0 is ignored: the step was not measured."""
        if seconds <= 0:
            return
        bucket, expected = _bucket(work), self.coefficients.seconds(work)
        sums = self._buckets.get(bucket, _NO_STEPS)
        deviates = expected > 0 and not expected / _DEVIATION <= seconds <= expected * _DEVIATION
        if deviates and sums is not _NO_STEPS:
            seconds = min(seconds, _OUTLIER * expected)
        x = [value * scale / seconds for value, scale in zip((1, *work), _SCALES, strict=True)]
        added = [a * b for a in x for b in x] + x + [1.0]
        self._buckets[bucket] = [_FADE * old + new for old, new in zip(sums, added, strict=True)]
        self._num_observed += 1
        often = _MIN_STEPS <= self._num_observed < 4 * _STEPS_PER_FIT
        is_new = deviates and sums[-1] < _STEPS_PER_FIT - 1
        if often or is_new or self._num_observed % _STEPS_PER_FIT == 0:
            self._fit()

    def _fit(self) -> None:
        totals = [sum(parts) for parts in zip(*self._buckets.values(), strict=True)]
        xx, xy = totals[: _SIZE * _SIZE], totals[_SIZE * _SIZE : -1]
        if len({tokens for tokens, _ in self._buckets}) == 1:
            # Steps of one size cannot separate the base from the tokens. Attributing all to the tokens overestimates
            # larger steps and underestimates smaller ones, so the chunker produces steps of other sizes, and they
            # separate the two.
            self.coefficients = StepCoefficients(token=xy[1] / xx[_SIZE + 1] * _SCALES.token)
            return
        for i in range(_SIZE):
            xx[(_SIZE + 1) * i] += _RIDGE * (1 + xx[0])
        weight = xx[_SIZE + 1] * (_PRIOR_CONTEXT * _SCALES.context_pair / _SCALES.token) ** 2
        xx[-1] += weight
        xy[-1] += weight * self._prior / _SCALES.context_pair
        solution = non_negative_least_squares(xx, xy)
        self.coefficients = StepCoefficients(*map(float.__mul__, solution, _SCALES))


def _bucket(work: StepWork) -> tuple[int, int]:
    """Return the bucket of a step: the magnitudes of its tokens, and of the context of a token."""
    return work.tokens.bit_length(), -(-(work.context_pairs // work.tokens).bit_length() // 3)


def non_negative_least_squares(xx: Sequence[float], xy: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimises x' xx x - 2 xy' x.

    `xx` is positive definite [n x n, row-major]. Solves the system for each set of non-zero coefficients; one of them
    has the minimum.
    """
    n = len(xy)
    best, least = [0.0] * n, 0.0
    for size in range(n, 0, -1):
        for free in itertools.combinations(range(n), size):
            found = _solve([[xx[n * i + j] for j in free] for i in free], [xy[i] for i in free])
            if min(found) < 0:
                continue
            x = [0.0] * n
            for i, value in zip(free, found, strict=True):
                x[i] = value
            # At the minimum over a set, x' xx x = xy' x.
            objective = -sum(xy[i] * x[i] for i in range(n))
            if objective < least:
                best, least = x, objective
            if size == n:
                return best  # the unconstrained minimum satisfies the constraints
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
