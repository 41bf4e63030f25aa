"""Drawing a token from a distribution, whole or within limits.

The limits apply one after another, temperature first, in the order of transformers' warpers: top-k, then top-p over
what top-k left, then min-p, then typical-p over what those left. In order of likelihood the first three each keep a
prefix, mostly a short one: the likeliest few are sorted and tried first. Where these do not do, nothing is sorted
(a whole vocabulary takes milliseconds): histograms tell how likely a token must be to stay.

No row's result depends on the rows beside it: sums are taken over runs of one fixed length, and which way a row goes
is decided by the row alone.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Iterator

import torch

from fastgen.core.request import SamplingParams

# Weights summed in one go; then the sums are summed.
_RUN = 256
# How many of the likeliest tokens are tried first: so few take no longer to find than the weights to sum.
_FEW = 256
# Weights whose histograms are taken in one go, which bounds the memory for it.
_WEIGHTS_AT_ONCE = 1 << 18
# A float32 from 0 to 1 orders like its bits, of which the upper two are 0: the next 15 make the first histogram, the
# last 15 the second.
_HIGH_BINS, _LOW_BITS = 1 << 15, 15


def is_limited(sampling: SamplingParams) -> bool:
    """Does anything but temperature shape the distribution?"""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1


def draw_whole(logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] from the whole vocabulary of `logits` [R, V] by inverse transform of `uniforms` [R] in float64."""
    return _draw(_weights(logits, settings), uniforms)


def draw_limited(logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] from `logits` [R, V] within each row's limits, by inverse transform of `uniforms` [R] in float64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    wide = set(range(len(logits)))
    few = [row for row in wide if _may_be_few(settings[row], logits.shape[1])]
    if few:
        found, fits = _draw_among_few(_take(logits, few), [settings[row] for row in few], uniforms[few])
        tokens[few] = found
        wide -= {row for row, fit in zip(few, fits.tolist(), strict=True) if fit}
    for rows in _slices(sorted(wide), max(1, _WEIGHTS_AT_ONCE // logits.shape[1])):
        own = [settings[row] for row in rows]
        tokens[rows] = _draw(_keep_of_all(_weights(_take(logits, rows), own), own), uniforms[rows])
    return tokens


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] by their weights [R, whole runs].

    In two steps, of which the first sees a sum for each run of tokens: a cumulative sum over a vocabulary is slow.
    """
    runs = weights.view(len(weights), -1, _RUN)
    until = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, runs]
    wanted = uniforms[:, None] * until[:, -1:]
    run = _first_beyond(until, wanted)
    before = torch.where(run > 0, until.gather(-1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1)  # [R, _RUN]
    place = _first_beyond(chosen.cumsum(-1, dtype=torch.float64), wanted - before)
    return (run * _RUN + place).squeeze(-1)


def _may_be_few(sampling: SamplingParams, vocabulary: int) -> bool:
    """May the `_FEW` likeliest tokens do? Never fewer than a top-k: top-p is a share of the whole of it."""
    bounded = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return bounded and min(sampling.top_k, vocabulary) <= _FEW and sampling.typical_p == 1


def _draw_among_few(
    logits: torch.Tensor, settings: abc.Sequence[SamplingParams], uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] out of each row's `_FEW` likeliest, and [R] whether its limits keep no more than these."""
    likeliest, order = logits.topk(min(_FEW, logits.shape[1]), sorted=True)
    scaled = likeliest.double() - likeliest[:, :1]
    weights = scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    needs_total = any(sampling.top_p < 1 and sampling.top_k == 0 for sampling in settings)
    total = _sum(_weights(logits, settings)) if needs_total else weights[:, :1]
    kept = _keep(weights, total, settings)
    fits = ~kept[:, -1] | (logits.shape[1] <= _FEW)
    until = weights.where(kept, 0.0).cumsum(-1)
    return order.gather(-1, _first_beyond(until, uniforms[:, None] * until[:, -1:])).squeeze(-1), fits


def _keep(ordered: torch.Tensor, total: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """Which of the likeliest weights [R, n] top-k, top-p and min-p leave. The likeliest always stays.

    Args:
        ordered: relative to the first, largest first.
        total: [R, 1], the sum of the row's whole vocabulary; of rows with a top-k it is not looked at.
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


def _keep_of_all(weights: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """`weights` [R, whole runs] with those zeroed that the limits drop. Tokens as likely as the last to stay do too."""

    def drop_below(least: torch.Tensor) -> torch.Tensor:
        return weights.where(weights >= least, 0.0)

    if any(sampling.top_k for sampling in settings):
        wanted = _column([sampling.top_k or math.inf for sampling in settings], weights).double()
        weights = drop_below(_least_to_reach(wanted, weights, (weights > 0).double()))
    if any(sampling.top_p < 1 for sampling in settings):
        shares = _column([sampling.top_p if sampling.top_p < 1 else math.inf for sampling in settings], weights)
        weights = drop_below(_least_to_reach(shares.double() * _sum(weights), weights, weights.double()))
    weights = drop_below(_column([sampling.min_p for sampling in settings], weights))
    if any(sampling.typical_p < 1 for sampling in settings):
        shares = _column([sampling.typical_p if sampling.typical_p < 1 else math.inf for sampling in settings], weights)
        weights = _keep_typical(weights, shares.double())
    return weights


def _keep_typical(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """`weights` [R, n] with those zeroed that typical sampling drops (Meister et al., 2022, section 4).

    Tokens are taken by how far their surprise is from the expected one until their probabilities reach `shares`
    [R, 1]; those as far as the last one stay too.
    """
    likelihood = weights / _sum(weights)  # float64
    surprise = -likelihood.log()
    expected = _sum(likelihood * surprise.where(weights > 0, 0.0))
    closeness = (1 / (1 + (surprise - expected).abs())).float()
    return weights.where(closeness >= _least_to_reach(shares, closeness, likelihood), 0.0)


def _least_to_reach(wanted: torch.Tensor, values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The largest value [R, 1] such that `mass` [R, n] of all values from it on is `wanted` [R, 1] or more, or zero.

    `values` [R, n] are float32 from 0 to 1. What sorting them would tell, told by two histograms.
    """
    keys = values.contiguous().view(torch.int32).long()
    high, low = keys >> _LOW_BITS, keys & ((1 << _LOW_BITS) - 1)
    high_bin, above, reached = _from_above(wanted, high, mass, _HIGH_BINS)
    low_bin, _, _ = _from_above(wanted - above, low, mass.where(high == high_bin, 0.0), 1 << _LOW_BITS)
    found = ((high_bin << _LOW_BITS) | low_bin).int().view(torch.float32)
    return found.where(reached, 0.0)


def _from_above(
    wanted: torch.Tensor, keys: torch.Tensor, mass: torch.Tensor, num_bins: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bin [R, 1] where `mass`, summed from the highest key down, reaches `wanted`; the sum above; is it reached?"""
    bins = torch.zeros(len(keys), num_bins, dtype=torch.float64, device=keys.device).scatter_add_(1, keys, mass)
    until = bins.flip(-1).cumsum(-1)
    place = torch.searchsorted(until, wanted).clamp_(max=num_bins - 1)
    above = torch.where(place > 0, until.gather(-1, (place - 1).clamp(min=0)), 0.0)
    return num_bins - 1 - place, above, until[:, -1:] >= wanted


def _weights(logits: torch.Tensor, settings: abc.Sequence[SamplingParams]) -> torch.Tensor:
    """Likelihoods [R, V rounded up to whole runs] relative to each row's likeliest token, whose weight is 1."""
    scaled = logits.float() - logits.amax(-1, keepdim=True)
    scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    missing = -scaled.shape[1] % _RUN
    return torch.nn.functional.pad(scaled, (0, missing)) if missing else scaled


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """[R, whole runs] -> [R, 1] in float64."""
    return weights.view(len(weights), -1, _RUN).sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]


def _first_beyond(until: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first index [R, 1] whose cumulative sum in `until` [R, n] exceeds `wanted` [R, 1].

    Rounding may lead beyond every sum: then the last index that adds anything, so that its weight is never zero.
    """
    found = torch.searchsorted(until, wanted, right=True)
    last = torch.searchsorted(until, until[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=until.shape[1] - 1)


def _slices(rows: list[int], at_once: int) -> Iterator[list[int]]:
    for first in range(0, len(rows), at_once):
        yield rows[first : first + at_once]


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Rows of `logits`, uncopied where that is all of them."""
    return logits if len(rows) == len(logits) else logits[rows]


def _column(values: abc.Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
