"""Draw tokens from the softmax, with or without top-k, top-p, min-p and typical-p.

The filters apply in the order of transformers' warpers, after temperature: top-k, top-p over the rest, min-p, then
typical-p over the rest. In order of probability, ties in order of ids, the first three each keep a prefix, usually a
short one, so the top tokens are sorted and tried first. If they do not suffice, nothing is sorted, because sorting a
whole vocabulary takes milliseconds: histograms give the threshold that a token must reach, and ties with the last kept
token are kept. `fastgen.kernels.gpu.sampling.tokens` follows the same rules.

A row's result never depends on the rest of the batch: sums run over fixed-length blocks of tokens, and the row alone
decides which path it takes.
"""

from __future__ import annotations

import math
from collections import abc

import torch

from fastgen.core.request import SamplingParams
from fastgen.sampling.rows import row_slices, take_rows

# Block length of the two-level sums.
_RUN = 256
# Number of top tokens tried first: finding them takes no longer than summing the weights.
_TOP = 256
# Weights per histogram pass: bounds its memory.
_WEIGHTS_AT_ONCE = 1 << 18
# float32 values from 0 to 1 order like their bits, of which the upper two are 0. The next 15 bits index the first
# histogram, the last 15 the second.
_HIGH_BINS, _LOW_BITS = 1 << 15, 15


def is_filtered(sampling: SamplingParams) -> bool:
    """Return whether top-k, top-p, min-p or typical-p is set."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1


def draw_unfiltered(
    logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor
) -> torch.Tensor:
    """Draw tokens [R] from the softmax of `logits` [R, V] by inverse transform of `uniforms` [R], in float64."""
    return _draw(_weights(logits, settings), uniforms)


def draw_filtered(logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] from `logits` [R, V] after filters, by inverse transform of `uniforms` [R], in float64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    remaining = set(range(len(logits)))
    tried = [row for row in range(len(logits)) if _top_may_suffice(settings[row], logits.shape[1])]
    if tried:
        drawn, suffices = _draw_from_top(take_rows(logits, tried), [settings[row] for row in tried], uniforms[tried])
        tokens[tried] = drawn
        remaining -= {row for row, enough in zip(tried, suffices.tolist(), strict=True) if enough}
    for rows in row_slices(sorted(remaining), max(1, _WEIGHTS_AT_ONCE // logits.shape[1])):
        own = [settings[row] for row in rows]
        tokens[rows] = _draw(_filter(_weights(take_rows(logits, rows), own), own), uniforms[rows])
    return tokens


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw tokens [R] in proportion to `weights` [R, whole runs].

    Two levels: first among sums of runs, then within the run. One cumulative sum over the vocabulary is slow.
    """
    runs = weights.view(len(weights), -1, _RUN)
    until = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, runs]
    wanted = uniforms[:, None] * until[:, -1:]
    run = _first_beyond(until, wanted)
    before = torch.where(run > 0, until.gather(-1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1)  # [R, _RUN]
    place = _first_beyond(chosen.cumsum(-1, dtype=torch.float64), wanted - before)
    return (run * _RUN + place).squeeze(-1)


def _top_may_suffice(sampling: SamplingParams, vocabulary: int) -> bool:
    """Return whether the `_TOP` top tokens may suffice. They must cover all of top-k, of which top-p is a share."""
    bounded = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return bounded and min(sampling.top_k, vocabulary) <= _TOP and sampling.typical_p == 1


def _draw_from_top(
    logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [R] from each row's `_TOP` top tokens. Also return [R] whether the filters keep no others."""
    likeliest, order = logits.topk(min(_TOP, logits.shape[1]), sorted=True)
    scaled = likeliest.double() - likeliest[:, :1]
    weights = scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    needs_total = any(sampling.top_p < 1 and sampling.top_k == 0 for sampling in settings)
    total = _sum(_weights(logits, settings)) if needs_total else weights[:, :1]
    kept = _kept(weights, total, settings)
    fits = ~kept[:, -1] | (logits.shape[1] <= _TOP)
    until = weights.where(kept, 0.0).cumsum(-1)
    place = _first_beyond(until, uniforms[:, None] * until[:, -1:])
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


def _kept(ordered: torch.Tensor, total: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """Return a mask [R, n] of the tokens that top-k, top-p and min-p keep. The first is always kept.

    Args:
        ordered: weights [R, n] relative to the first, largest first.
        total: [R, 1], the sum over the row's whole vocabulary; ignored for rows with top-k.
        settings: [R].
    """
    top_k = _column([s.top_k or math.inf for s in settings], ordered)
    within_k = torch.arange(ordered.shape[1], device=ordered.device) < top_k
    ordered = ordered.where(within_k, 0.0)
    until = ordered.cumsum(-1)
    mass = torch.where(top_k.isinf(), total, until[:, -1:])
    top_p = _column([s.top_p for s in settings], ordered)
    keep = within_k & ((until - ordered < top_p * mass) | (top_p >= 1))
    keep &= ordered >= _column([s.min_p for s in settings], ordered)
    keep &= ordered > 0
    keep[:, 0] = True
    return keep


def _filter(weights: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """Return `weights` [R, whole runs] with filtered tokens zeroed. Ties with the last kept token are kept."""

    def drop_below(least: torch.Tensor) -> torch.Tensor:
        return weights.where(weights >= least, 0.0)

    if any(sampling.top_k for sampling in settings):
        wanted = _column([sampling.top_k or math.inf for sampling in settings], weights).double()
        weights = drop_below(_threshold(wanted, weights, (weights > 0).double()))
    if any(sampling.top_p < 1 for sampling in settings):
        shares = _column([sampling.top_p if sampling.top_p < 1 else math.inf for sampling in settings], weights)
        weights = drop_below(_threshold(shares.double() * _sum(weights), weights, weights.double()))
    weights = drop_below(_column([sampling.min_p for sampling in settings], weights))
    if any(sampling.typical_p < 1 for sampling in settings):
        shares = _column([sampling.typical_p if sampling.typical_p < 1 else math.inf for sampling in settings], weights)
        weights = _keep_typical(weights, shares.double())
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


def _weights(logits: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """Return weights [R, V rounded up to whole runs] relative to each row's top token, whose weight is 1."""
    scaled = logits.float() - logits.amax(-1, keepdim=True)
    scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    missing = -scaled.shape[1] % _RUN
    return torch.nn.functional.pad(scaled, (0, missing)) if missing else scaled


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


def _column(values: abc.Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
