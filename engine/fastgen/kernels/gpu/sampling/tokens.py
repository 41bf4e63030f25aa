"""Operators that turn processed logits into tokens.

See `logits.py` for the state they share.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fastgen.kernels.gpu.operators import operator
from fastgen.kernels.gpu.sampling.logits import Column, parameters_of

# Top tokens that are sorted and tried first: see `sample_tokens`.
TOP = 256
# Constants of SplitMix64 as signed integers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@operator(mutates=("scores",))
def sample_tokens(
    scores: torch.Tensor,
    chunk_max: torch.Tensor,  # noqa: ARG001
    chunk_sum: torch.Tensor,  # noqa: ARG001
    group_max: torch.Tensor,  # noqa: ARG001
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Return a token [R] int32 for each row.

    In greedy rows it is the first of the largest scores, otherwise a random one. The filters and the order in which the
    inverse transform walks the tokens are those of `fastgen.sampling.top_k_top_p`:

    - Without filters, tokens are drawn in the order of their ids.
    - With top-k, top-p or min-p that keep fewer than `TOP` tokens, in descending order of their scores; ties by id.
    - If they keep more, or with typical-p, in the order of ids. Ties with the last kept token are kept.

    The uniform number is SplitMix64 of (seed, position). Weights are float32 and their sums float64; weights of the top
    tokens are float64. Other tokens cost one conversion and one addition in float64 per pass over them, because
    consumer GPUs compute float64 at 1/64 of the float32 rate.

    Args:
        scores, chunk_max, chunk_sum, group_max: of `process_logits`; `scores` are unspecified afterwards.
        slots: [R] int32; a padded row (-1) gets token 0.
        positions: [R] int32.
        columns: [slots, len(Column)] int64.
    """
    tokens = torch.zeros(len(scores), dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            tokens[row] = _sample_token(scores[row], parameters_of(columns, slot), positions[row])
    return tokens


@operator(mutates=("lists", "counts", "last_tokens"))
def commit_tokens(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Record the sampled `tokens` [R] int32 in the state of their slots.

    `counts`, `lists` and `last_tokens` [slots] int32 are changed in place. A slot appears at most once in `slots`. See
    `process_logits` for the other arguments.
    """
    for token, slot, position in zip(tokens.tolist(), slots.tolist(), positions.tolist(), strict=True):
        if slot < 0:
            continue
        parameters = parameters_of(columns, slot)
        last_tokens[slot] = token
        if parameters[Column.COUNT_ROW] >= 0:
            counts[parameters[Column.COUNT_ROW], token] += 2
        if parameters[Column.RING_LENGTH]:
            num_generated = position - parameters[Column.NUM_PROMPT_TOKENS]
            lists[parameters[Column.RING] + num_generated % parameters[Column.RING_LENGTH]] = token


def _sample_token(scores: torch.Tensor, parameters: list[Any], position: torch.Tensor) -> torch.Tensor:
    """Return a token [] for one row of `scores` [V]."""
    temperature, top_k = parameters[Column.TEMPERATURE], parameters[Column.TOP_K]
    top_p, min_p, typical_p = (parameters[column] for column in (Column.TOP_P, Column.MIN_P, Column.TYPICAL_P))
    if temperature == 0:
        return scores.argmax()
    uniform = _uniform(torch.tensor(parameters[Column.SEED]), position.long())
    weights = ((scores - scores.max()) / scores.new_tensor(temperature)).exp()
    bounded = top_k > 0 or top_p < 1 or min_p > 0
    if bounded and typical_p == 1 and min(top_k, len(scores)) <= TOP:
        ordered, ids = scores.sort(descending=True, stable=True)
        top = ((ordered[:TOP].double() - ordered[0]) / temperature).exp()
        kept = _kept_of_top(top, weights.sum(dtype=torch.float64), top_k, top_p, min_p)
        if not kept[-1] or len(scores) <= TOP:
            return ids[_draw(top.where(kept, 0.0), uniform)]
    return _draw(_filtered(weights, top_k, top_p, min_p, typical_p).double(), uniform)


def _kept_of_top(top: torch.Tensor, total: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return which of the `top` weights [n], in descending order, are kept.

    `total` [] is the sum of the weights of the whole vocabulary.
    """
    within = torch.arange(len(top)) < (top_k or math.inf)
    top = top.where(within, 0.0)
    until = top.cumsum(-1)
    mass = until[-1] if top_k else total
    kept = within & ((until - top < top_p * mass) | (top_p >= 1)) & (top >= min_p) & (top > 0)
    kept[0] = True
    return kept


def _filtered(weights: torch.Tensor, top_k: int, top_p: float, min_p: float, typical_p: float) -> torch.Tensor:
    """Return `weights` [V] with filtered tokens zeroed. Limits round to the float32 of the weights."""
    if top_k:
        least = _threshold(torch.tensor(float(top_k)), weights, (weights > 0).double())
        weights = weights.where(weights >= least, 0.0)
    if top_p < 1:
        wanted = torch.tensor(top_p).double() * weights.sum(dtype=torch.float64)
        weights = weights.where(weights >= _threshold(wanted, weights, weights.double()), 0.0)
    weights = weights.where(weights >= torch.tensor(min_p), 0.0)
    if typical_p < 1:
        likelihood = weights / weights.sum(dtype=torch.float64)
        surprisal = -likelihood.log()
        expected = (likelihood * surprisal).where(weights > 0, 0.0).sum()
        closeness = (1 / (1 + (surprisal - expected).abs())).float()
        least = _threshold(torch.tensor(typical_p).double(), closeness, likelihood)
        weights = weights.where(closeness >= least, 0.0)
    return weights


def _threshold(wanted: torch.Tensor, values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the largest value [] that keeps enough mass, or 0.

    The `mass` [V] of all `values` [V] >= it is at least `wanted`.
    """
    ordered, ids = values.sort(descending=True)
    reached = mass[ids].cumsum(-1) >= wanted
    return ordered[reached.int().argmax()] if reached.any() else values.new_zeros(())


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return a random index [] in proportion to `weights` [n] float64.

    It is the first index whose cumulative sum exceeds its share.
    """
    until = weights.cumsum(-1)
    return torch.minimum(
        torch.searchsorted(until, uniform * until[-1], right=True), torch.searchsorted(until, until[-1])
    ).clamp(max=len(weights) - 1)


def _uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers in [0, 1) by SplitMix64.

    They are functions of int64 `seeds` and `positions`, whose arithmetic wraps.
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift(bits, 11).double() / (1 << 53)


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 to the right, filling with zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)
