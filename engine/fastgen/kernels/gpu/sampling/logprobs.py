"""Operator that computes log-probabilities and ranks of tokens."""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.operators import operator

# Most top tokens of a row.
MOST_TOP = 32


@operator()
def token_logprobs(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the log-probability and rank of one token of each row, and the row's top tokens, in two launches.

    Each exponential is computed in float32 and summed in float64. Equal logits rank by token id.

    Args:
        logits: [R, V], float32, bfloat16 or float16.
        rows: [Q] int32, rows of `logits`; -1 for padding, whose results are unspecified.
        tokens: [Q] int32.
        num_top: from 0 to MOST_TOP.

    Returns:
        [Q, 2 + 2 * num_top] float64: log-probability, rank from 1, then `num_top` ids in descending order of
        probability, -1 where the vocabulary has fewer, then their log-probabilities.
    """
    assert num_top <= MOST_TOP
    logits = logits[rows.clamp(min=0)].float()
    largest = logits.amax(-1, keepdim=True)
    norm = largest.double() + (logits - largest).exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    ordered, ids = logits.sort(descending=True, stable=True)
    ranks = (ids == tokens[:, None]).int().argmax(-1, keepdim=True) + 1
    count = min(num_top, logits.shape[1])
    packed = torch.full((len(rows), 2 + 2 * num_top), -1.0, dtype=torch.float64)
    packed[:, :1] = logits.gather(-1, tokens[:, None].long()) - norm
    packed[:, 1:2] = ranks
    packed[:, 2 : 2 + count] = ids[:, :count].double()
    packed[:, 2 + num_top : 2 + num_top + count] = ordered[:, :count] - norm
    return packed
