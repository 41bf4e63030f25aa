"""Sampling of single steps by the sampler on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.core.step_output import TokenLogprobs
from fastgen.kernels.gpu.sampling import top_k_top_p
from fastgen.kernels.gpu.sampling.changes import Mask
from fastgen.kernels.gpu.sampling.columns import IntArray
from fastgen.sampling.host_sampler import HostSampler
from fastgen.sampling.parameters import columns_of


class Draw(NamedTuple):
    """The inputs for sampling one row."""

    sampling: SamplingParams
    seed: int
    tokens: Sequence[int] = ()
    num_prompt_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    mask: Mask | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Return what `HostSampler.sample` returns for new rows."""
    sampler = HostSampler(logits.shape[1], frozenset().union(*(draw.end_tokens for draw in draws)))
    for row, draw in enumerate(draws):
        sampler.admit(RowParameters(row, draw.sampling, draw.seed, draw.num_prompt_tokens, list(draw.tokens)))
    masks = {row: draw.mask for row, draw in enumerate(draws) if draw.mask is not None}
    positions = np.array([len(draw.tokens) for draw in draws], np.int32)
    return sampler.sample(logits, np.arange(len(draws), dtype=np.int32), positions, masks)


def parameters(settings: Sequence[SamplingParams], vocabulary: int) -> IntArray:
    """Return the columns of new sequences."""
    return np.stack([columns_of(RowParameters(0, sampling, 0, 1, [0]), vocabulary) for sampling in settings])


def draw_tokens(logits: torch.Tensor, sampling: SamplingParams, numbers: torch.Tensor) -> torch.Tensor:
    """Return the tokens [R] of `logits` [R, V] for the uniform `numbers` [R], as the sampler would draw them."""
    own = parameters([sampling] * len(logits), logits.shape[1])
    draw = top_k_top_p.draw_filtered if top_k_top_p.is_filtered(own).all() else top_k_top_p.draw_unfiltered
    return draw(logits, own, numbers)
