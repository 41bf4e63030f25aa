"""Choose tokens: greedily, or from the softmax, with or without top-k, top-p, min-p and typical-p.

The filters apply in the order of transformers' warpers, after temperature: top-k, top-p over the rest, min-p, then
typical-p over the rest. In order of probability, ties in order of ids, the first three each keep a prefix, usually a
short one, so the top tokens are sorted and tried first. If they do not suffice, nothing is sorted, because sorting a
whole vocabulary takes milliseconds: histograms give the threshold that a token must reach, and ties with the last kept
token are kept.

A row's result never depends on the rest of the batch: sums run over fixed-length blocks of tokens, and the row alone
decides which path it takes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels.gpu.sampling.columns import Column, FloatArray, IntArray, of_column, take_rows
from fastgen.kernels.gpu.sampling.rng import uniforms

# Block length of the two-level sums.
_RUN = 256
# Number of top tokens tried first: finding them takes no longer than summing the weights.
TOP = 256
# Weights per histogram pass: bounds its memory.
_WEIGHTS_AT_ONCE = 1 << 18
# float32 values from 0 to 1 order like their bits, of which the upper two are 0. The next 15 bits index the first
# histogram, the last 15 the second.
_HIGH_BINS, _LOW_BITS = 1 << 15, 15


def choose_tokens(
    logits: torch.Tensor, parameters: IntArray, positions: npt.NDArray[np.integer], *, rows_at_once: int
) -> torch.Tensor:
    """Return a token [R] int64 for each row of `logits` [R, V], of any floating type, on any device.

    Greedy rows get the first of the largest logits. The random number of the others is a function of their seed and
    position.

    Args:
        parameters: [R, len(Column)].
        positions: [R], position of the token to choose in its sequence.
        rows_at_once: rows to draw from at once: each takes up to three float64 copies of its logits.
    """
    is_random = of_column(parameters, Column.TEMPERATURE) > 0
    if not is_random.any():
        return logits.argmax(-1)
    numbers = torch.from_numpy(uniforms(parameters[:, Column.SEED], positions)).to(logits.device)
    filtered = is_random & is_filtered(parameters)
    methods = ((draw_filtered, filtered), (draw_unfiltered, is_random & ~filtered), (_take_largest, ~is_random))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for choose, rows in methods:
        if rows.all() and len(rows) <= rows_at_once:
            return choose(logits, parameters, numbers)
        group = np.flatnonzero(rows)
        for first in range(0, len(group), rows_at_once):
            some = group[first : first + rows_at_once]
            tokens[some] = choose(take_rows(logits, some.tolist()), parameters[some], numbers[some])
    return tokens


def _take_largest(logits: torch.Tensor, _parameters: IntArray, _numbers: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def is_filtered(parameters: IntArray) -> npt.NDArray[np.bool_]:
    """Return [R] whether top-k, top-p, min-p or typical-p is set."""
    return _is_bounded(parameters) | (of_column(parameters, Column.TYPICAL_P) < 1)


def _is_bounded(parameters: IntArray) -> npt.NDArray[np.bool_]:
    """Return [R] whether top-k, top-p or min-p is set: the filters that keep the top tokens."""
    top_p, min_p = of_column(parameters, Column.TOP_P), of_column(parameters, Column.MIN_P)
    return (parameters[:, Column.TOP_K] > 0) | (top_p < 1) | (min_p > 0)


def draw_unfiltered(logits: torch.Tensor, parameters: IntArray, numbers: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] from the softmax of `logits` [R, V] by inverse transform of `numbers` [R], in float64."""
    return _draw(_weights(logits, parameters), numbers)


def draw_filtered(logits: torch.Tensor, parameters: IntArray, numbers: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] from `logits` [R, V] after filters, by inverse transform of `numbers` [R], in float64."""
    may_suffice = _top_may_suffice(parameters, logits.shape[1])
    if may_suffice.all():
        tokens, suffices = _draw_from_top(logits, parameters, numbers)
        remaining = ~suffices.cpu().numpy()
    else:
        tokens, remaining = torch.empty(len(logits), dtype=torch.int64, device=logits.device), ~may_suffice
        tried = np.flatnonzero(may_suffice)
        if len(tried):
            drawn, suffices = _draw_from_top(take_rows(logits, tried.tolist()), parameters[tried], numbers[tried])
            tokens[tried], remaining[tried] = drawn, ~suffices.cpu().numpy()
    rows, size = np.flatnonzero(remaining), max(1, _WEIGHTS_AT_ONCE // logits.shape[1])
    for first in range(0, len(rows), size):
        some = rows[first : first + size]
        own = parameters[some]
        tokens[some] = _draw(_filter(_weights(take_rows(logits, some.tolist()), own), own), numbers[some])
    return tokens


def _draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] in proportion to `weights` [R, whole runs].

    Two levels: first among sums of runs, then within the run. One cumulative sum over the vocabulary is slow.
    """
    runs = weights.view(len(weights), -1, _RUN)
    until = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, runs]
    wanted = numbers[:, None] * until[:, -1:]
    run = _first_beyond(until, wanted)
    before = torch.where(run > 0, until.gather(-1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1)  # [R, _RUN]
    place = _first_beyond(chosen.cumsum(-1, dtype=torch.float64), wanted - before)
    return (run * _RUN + place).squeeze(-1)


def _top_may_suffice(parameters: IntArray, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Return [R] whether the `TOP` top tokens may suffice. They must cover all of top-k, of which top-p is a share."""
    covered = np.minimum(parameters[:, Column.TOP_K], vocabulary) <= TOP
    may_suffice: npt.NDArray[np.bool_] = covered & (of_column(parameters, Column.TYPICAL_P) == 1)
    return may_suffice & _is_bounded(parameters)


def _draw_from_top(
    logits: torch.Tensor, parameters: IntArray, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [R] from each row's `TOP` top tokens. Also return [R] whether the filters keep no others."""
    likeliest, order = logits.topk(min(TOP, logits.shape[1]), sorted=True)
    scaled = _with_numbers(likeliest.double() - likeliest[:, :1])
    weights = scaled.div_(_column(of_column(parameters, Column.TEMPERATURE), scaled)).exp_()
    needs_total = (of_column(parameters, Column.TOP_P) < 1) & (parameters[:, Column.TOP_K] == 0)
    total = _sum(_weights(logits, parameters)) if needs_total.any() else weights[:, :1]
    kept = _kept(weights, total, parameters)
    fits = ~kept[:, -1] | (logits.shape[1] <= TOP)
    until = weights.where(kept, 0.0).cumsum(-1)
    place = _first_beyond(until, numbers[:, None] * until[:, -1:])
    return _token_at(place, logits, likeliest, order), fits


def _token_at(place: torch.Tensor, logits: torch.Tensor, likeliest: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the token [R] at `place` [R, 1] in descending order of `logits` [R, V], ties by ascending id.

    Args:
        likeliest, order: [R, n], the largest logits and their tokens. Ties are in any order, and some tokens equal to
            the last one may be missing.
    """
    value = likeliest.gather(-1, place)
    is_equal = (logits == value).scatter_(1, order.gather(-1, place), True)  # NaN equals nothing
    rows, tokens = is_equal.nonzero(as_tuple=True)
    number = torch.arange(len(logits), device=logits.device)
    index = torch.searchsorted(rows, number) + (place - (likeliest > value).sum(-1, keepdim=True)).squeeze(-1)
    return tokens[index.minimum(torch.searchsorted(rows, number, right=True) - 1)]


def _kept(ordered: torch.Tensor, total: torch.Tensor, parameters: IntArray) -> torch.Tensor:
    """Return a mask [R, n] of the tokens that top-k, top-p and min-p keep. The first is always kept.

    Args:
        ordered: weights [R, n] relative to the first, largest first.
        total: [R, 1], the sum over the row's whole vocabulary; ignored for rows with top-k.
        parameters: [R, len(Column)].
    """
    top_k = _column(_unless_off(parameters[:, Column.TOP_K], parameters[:, Column.TOP_K] > 0), ordered)
    within_k = torch.arange(ordered.shape[1], device=ordered.device) < top_k
    ordered = ordered.where(within_k, 0.0)
    until = ordered.cumsum(-1)
    mass = torch.where(top_k.isinf(), total, until[:, -1:])
    top_p = _column(of_column(parameters, Column.TOP_P), ordered)
    keep = within_k & ((until - ordered < top_p * mass) | (top_p >= 1))
    keep &= ordered >= _column(of_column(parameters, Column.MIN_P), ordered)
    keep &= ordered > 0
    keep[:, 0] = True
    return keep


def _filter(weights: torch.Tensor, parameters: IntArray) -> torch.Tensor:
    """Return `weights` [R, whole runs] with filtered tokens zeroed. Ties with the last kept token are kept."""

    def drop_below(least: torch.Tensor) -> torch.Tensor:
        return weights.where(weights >= least, 0.0)

    top_k, top_p, typical_p = (
        parameters[:, Column.TOP_K],
        of_column(parameters, Column.TOP_P),
        of_column(parameters, Column.TYPICAL_P),
    )
    if top_k.any():
        wanted = _column(_unless_off(top_k, top_k > 0), weights).double()
        weights = drop_below(_threshold(wanted, weights, (weights > 0).double()))
    if (top_p < 1).any():
        shares = _column(_unless_off(top_p, top_p < 1), weights)
        weights = drop_below(_threshold(shares.double() * _sum(weights), weights, weights.double()))
    weights = drop_below(_column(of_column(parameters, Column.MIN_P), weights))
    if (typical_p < 1).any():
        weights = _keep_typical(weights, _column(_unless_off(typical_p, typical_p < 1), weights).double())
    return weights


def _keep_typical(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return `weights` [R, n] with the tokens zeroed that typical sampling drops (Meister et al., 2022, section 4).

    Tokens are kept in order of the distance of their surprisal from the entropy, until their probabilities reach
    `shares` [R, 1]. Ties with the last kept token are kept.
    """
    likelihood = weights / _sum(weights)  # float64
    surprise = -likelihood.log()
    expected = _sum(likelihood * surprise.where(weights > 0, 0.0))
    closeness = (1 / (1 + (surprise - expected).abs())).float()
    return weights.where(closeness >= _threshold(shares, closeness, likelihood), 0.0)


def _threshold(wanted: torch.Tensor, values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the largest value [R, 1] with a mass of at least `wanted` [R, 1] at or above it, or zero.

    `values` [R, n] are float32 from 0 to 1, with weights `mass` [R, n]. Two histograms replace a sort.
    """
    keys = values.contiguous().view(torch.int32).long()
    high, low = keys >> _LOW_BITS, keys & ((1 << _LOW_BITS) - 1)
    high_bin, above, reached = _descend(wanted, high, mass, _HIGH_BINS)
    low_bin, _, _ = _descend(wanted - above, low, mass.where(high == high_bin, 0.0), 1 << _LOW_BITS)
    found = ((high_bin << _LOW_BITS) | low_bin).int().view(torch.float32)
    return found.where(reached, 0.0)


def _descend(
    wanted: torch.Tensor, keys: torch.Tensor, mass: torch.Tensor, num_bins: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum `mass` from the highest key down until it reaches `wanted`.

    Return the bin [R, 1] that reaches it, the mass above that bin, and whether all of `mass` reaches it.
    """
    bins = torch.zeros(len(keys), num_bins, dtype=torch.float64, device=keys.device).scatter_add_(1, keys, mass)
    until = bins.flip(-1).cumsum(-1)
    place = torch.searchsorted(until, wanted).clamp_(max=num_bins - 1)
    above = torch.where(place > 0, until.gather(-1, (place - 1).clamp(min=0)), 0.0)
    return num_bins - 1 - place, above, until[:, -1:] >= wanted


def _weights(logits: torch.Tensor, parameters: IntArray) -> torch.Tensor:
    """Return weights [R, V rounded up to whole runs] relative to each row's top token, whose weight is 1."""
    largest = logits.amax(-1, keepdim=True)
    scaled = logits.float() - largest
    if not largest.isfinite().all():
        scaled = _with_numbers(scaled)
    scaled.div_(_column(of_column(parameters, Column.TEMPERATURE), scaled)).exp_()
    missing = -scaled.shape[1] % _RUN
    return torch.nn.functional.pad(scaled, (0, missing)) if missing else scaled


def _with_numbers(scaled: torch.Tensor) -> torch.Tensor:
    """Replace NaN, in logits relative to the largest one, by 0.

    A model's logits may overflow. A token is drawn all the same: its request must not end the engine.
    """
    return scaled.nan_to_num_(nan=0.0, neginf=-torch.inf)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """Sum `weights` [R, whole runs] to [R, 1] in float64."""
    return weights.view(len(weights), -1, _RUN).sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]


def _first_beyond(until: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the first index [R, 1] whose cumulative sum in `until` [R, n] exceeds `wanted` [R, 1].

    If rounding pushes `wanted` beyond every sum, return the last index with a non-zero weight.
    """
    found = torch.searchsorted(until, wanted, right=True)
    last = torch.searchsorted(until, until[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=until.shape[1] - 1)


def _unless_off(values: npt.NDArray[np.generic], is_on: npt.NDArray[np.bool_]) -> FloatArray:
    """Return `values` [R], infinity where a filter is off."""
    return np.where(is_on, values, np.inf)


def _column(values: FloatArray, like: torch.Tensor) -> torch.Tensor:
    """Return `values` [R] as a column [R, 1] of the type of `like`."""
    return torch.from_numpy(values).to(like.device, like.dtype)[:, None]
