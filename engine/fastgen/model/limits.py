"""Drawing a token from a distribution, whole or within limits.

The limits apply one after another, temperature first, in the order of transformers' warpers: top-k, then top-p over
what top-k left, then min-p, then typical-p over what those left. In order of likelihood the first three each keep a
prefix. Sorting a vocabulary takes milliseconds, so the likeliest few are tried first.

No row's result depends on the rows beside it: sums are taken over runs of one fixed length, and a row is tried at the
widths that it needs itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Row

import torch

from fastgen.core.request import SamplingParams

# Weights summed in one go; then the sums are summed.
_RUN = 256
# How many of the likeliest tokens are looked at. A top-k of up to 256 costs a row no more than finding its maximum.
_WIDTHS = (256, 4096, 16384)
# Weights that are sorted in one go, which bounds the memory for it.
_WEIGHTS_AT_ONCE = 1 << 18


def is_limited(sampling: SamplingParams) -> bool:
    """Does anything but temperature shape the distribution?"""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1


def draw_whole(logits: torch.Tensor, settings: Row[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] from the whole vocabulary of `logits` [R, V] by inverse transform of `uniforms` [R] in float64.

    In two steps, of which the first sees a sum for each run of tokens: a cumulative sum over a vocabulary is slow.
    """
    runs = _weights(logits, settings).view(len(logits), -1, _RUN)
    until = runs.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, runs]
    wanted = uniforms[:, None] * until[:, -1:]
    run = _first_beyond(until, wanted)
    before = torch.where(run > 0, until.gather(-1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.gather(1, run[:, :, None].expand(-1, -1, _RUN)).squeeze(1)  # [R, _RUN]
    place = _first_beyond(chosen.cumsum(-1, dtype=torch.float64), wanted - before)
    return (run * _RUN + place).clamp_(max=logits.shape[1] - 1).squeeze(-1)


def draw_limited(logits: torch.Tensor, settings: Row[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [R] from `logits` [R, V] within each row's limits, by inverse transform of `uniforms` [R] in float64."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    vocabulary = logits.shape[1]
    pending = list(range(len(logits)))
    for width in (*(width for width in _WIDTHS if width < vocabulary), vocabulary):
        wanting = [row for row in pending if width == vocabulary or _may_fit(settings[row], width)]
        at_once = max(1, _WEIGHTS_AT_ONCE // width)
        settled: set[int] = set()
        for first in range(0, len(wanting), at_once):
            rows = wanting[first : first + at_once]
            own = logits if len(rows) == len(logits) else logits[rows]
            tokens[rows], fits = _draw_among(own, [settings[row] for row in rows], uniforms[rows], width)
            settled.update(row for row, fit in zip(rows, fits.tolist(), strict=True) if fit)
        pending = [row for row in pending if row not in settled]
        if not pending:
            break
    return tokens


def _may_fit(sampling: SamplingParams, width: int) -> bool:
    """May the `width` likeliest tokens do? Never fewer than a top-k: top-p is a share of the whole of it."""
    return sampling.top_k <= width and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _draw_among(
    logits: torch.Tensor, settings: Row[SamplingParams], uniforms: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] out of each row's `width` likeliest, and [R] whether its limits keep no more than these."""
    likeliest, order = logits.topk(width, sorted=True)
    scaled = likeliest.double() - likeliest[:, :1]
    weights = scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    total = _total(logits, settings) if any(s.top_p < 1 and s.top_k == 0 for s in settings) else weights[:, :1]
    kept = _keep(weights, total, settings)
    fits = ~kept[:, -1] if width < logits.shape[1] else torch.ones_like(kept[:, -1])
    typical = [row for row, sampling in enumerate(settings) if sampling.typical_p < 1]
    weights = weights.where(kept, 0.0)
    if typical:
        weights[typical] = _keep_typical(weights[typical], [settings[row].typical_p for row in typical])
    until = weights.cumsum(-1)
    return order.gather(-1, _first_beyond(until, uniforms[:, None] * until[:, -1:])).squeeze(-1), fits


def _keep(ordered: torch.Tensor, total: torch.Tensor, settings: Row[SamplingParams]) -> torch.Tensor:
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


def _keep_typical(weights: torch.Tensor, typical_p: Row[float]) -> torch.Tensor:
    """`weights` [R, n] with those zeroed that typical sampling drops (Meister et al., 2022, section 4).

    Tokens are taken by how far their surprise is from the expected one until their probabilities reach `typical_p`;
    those as far as the last one stay too.
    """
    likelihood = weights / weights.cumsum(-1)[:, -1:]
    surprise = -likelihood.log()
    entropy = (likelihood * surprise.where(weights > 0, 0.0)).cumsum(-1)[:, -1:]
    distance, order = (surprise - entropy).abs().sort(dim=-1, stable=True)
    until = likelihood.gather(-1, order).cumsum(-1)
    last = (until < _column(typical_p, until)).sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    within = distance <= distance.gather(-1, last)
    return weights * torch.zeros_like(within).scatter_(-1, order, within)


def _weights(logits: torch.Tensor, settings: Row[SamplingParams]) -> torch.Tensor:
    """Likelihoods [R, V rounded up to whole runs] relative to each row's likeliest token, whose weight is 1."""
    scaled = logits.float() - logits.amax(-1, keepdim=True)
    scaled.div_(_column([sampling.temperature for sampling in settings], scaled)).exp_()
    missing = -scaled.shape[1] % _RUN
    return torch.nn.functional.pad(scaled, (0, missing)) if missing else scaled


def _total(logits: torch.Tensor, settings: Row[SamplingParams]) -> torch.Tensor:
    """The sums [R, 1] of `_weights`."""
    runs = _weights(logits, settings).view(len(logits), -1, _RUN)
    return runs.sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]


def _first_beyond(until: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first index [R, 1] whose cumulative sum in `until` [R, n] exceeds `wanted` [R, 1].

    Rounding may lead beyond every sum: then the last index that adds anything, so that its weight is never zero.
    """
    found = torch.searchsorted(until, wanted, right=True)
    last = torch.searchsorted(until, until[:, -1:].contiguous())
    return torch.minimum(found, last).clamp_(max=until.shape[1] - 1)


def _column(values: Row[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
