"""Choosing each row's next token.

Random choices come from a counter-based generator keyed by (seed, position): the same seed gives the same tokens
whatever else is in the batch, after a preemption too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch

from fastgen.core.request import SamplingParams
from fastgen.model.cache import ROWS_SAMPLED_AT_ONCE

_FIRST_WIDTH = 512
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's choice depends on: how to choose, and the key of its random number."""

    sampling: SamplingParams
    seed: int
    position: int


def sample(logits: torch.Tensor, draws: Row[Draw]) -> list[int]:
    """One token for each row of `logits` [S, vocabulary]; of equal logits, greedy takes the smallest token id."""
    assert len(logits) == len(draws)
    if not draws:
        return []
    tokens = logits.argmax(-1)
    whole = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and not _is_cut(draw.sampling)]
    cut = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and _is_cut(draw.sampling)]
    for group, choose in ((whole, _sample_whole), (cut, _sample_cut)):
        for first in range(0, len(group), ROWS_SAMPLED_AT_ONCE):
            rows = group[first : first + ROWS_SAMPLED_AT_ONCE]
            tokens[rows] = choose(logits[rows], [draws[row] for row in rows])
    chosen: list[int] = tokens.tolist()
    return chosen


def _is_cut(sampling: SamplingParams) -> bool:
    """Does anything but temperature shape the distribution?"""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _column(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)[:, None]


def _weights(logits: torch.Tensor, draws: Row[Draw]) -> torch.Tensor:
    """Likelihoods in float64, relative to each row's likeliest token, whose weight is 1."""
    scaled = logits.double().div_(_column(draw.sampling.temperature for draw in draws))
    return scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()


def _pick(weights: torch.Tensor, draws: Row[Draw]) -> torch.Tensor:
    """Inverse transform: [R, n] weights -> [R, 1] indices."""
    cumulative = weights.cumsum(-1)
    wanted = _column(uniform(draw.seed, draw.position) for draw in draws) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True)
    # Rounding may lead beyond the last index of any weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(found, last)


def _sample_whole(logits: torch.Tensor, draws: Row[Draw]) -> torch.Tensor:
    """[R, vocabulary] -> [R], over the whole vocabulary in its own order."""
    return _pick(_weights(logits, draws), draws).squeeze(-1)


def _sample_cut(logits: torch.Tensor, draws: Row[Draw]) -> torch.Tensor:
    """[R, vocabulary] -> [R] within top-k, top-p and min-p.

    The limits apply one after another, temperature first, as Hugging Face's warpers do: top-k, then top-p over what
    top-k left, then min-p. In order of likelihood each keeps a prefix. Sorting a vocabulary takes milliseconds, so the
    likeliest few are tried first.
    """
    weights = _weights(logits, draws)
    vocabulary = weights.shape[1]
    # Never narrower than a top-k: top-p is a share of the whole of it.
    for width in (max(_FIRST_WIDTH, *(draw.sampling.top_k for draw in draws)), vocabulary):
        ordered, order = weights.topk(min(width, vocabulary), sorted=True)
        kept = _keep(ordered, weights.sum(-1, keepdim=True), [draw.sampling for draw in draws])
        if width >= vocabulary or not kept[:, -1].any():
            break
    return order.gather(-1, _pick(ordered.where(kept, 0.0), draws)).squeeze(-1)


def _keep(ordered: torch.Tensor, total: torch.Tensor, settings: Row[SamplingParams]) -> torch.Tensor:
    """Which of the likeliest [R, n] weights stay, given all weights' sum [R, 1]. The likeliest always does."""
    top_k = _column(s.top_k or math.inf for s in settings)
    within_k = torch.arange(ordered.shape[1]) < top_k
    ordered = ordered.where(within_k, 0.0)
    cumulative = ordered.cumsum(-1)
    mass = torch.where(top_k.isinf(), total, cumulative[:, -1:])
    top_p = _column(s.top_p for s in settings)
    keep = within_k & ((cumulative - ordered < top_p * mass) | (top_p >= 1))
    keep &= ordered >= _column(s.min_p for s in settings)
    keep[:, 0] = True
    return keep


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its key alone: SplitMix64's mixing (Steele et al., 2014) over both words."""
    bits = _mix((_mix((seed + _GOLDEN) & _MASK64) + (position + 1) * _GOLDEN) & _MASK64)
    return (bits >> 11) / float(1 << 53)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
