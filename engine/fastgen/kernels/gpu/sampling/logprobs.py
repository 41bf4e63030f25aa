"""Operator that computes log-probabilities and ranks of tokens."""

from __future__ import annotations

import numpy as np
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
    return score_tokens(logits[rows.clamp(min=0)], tokens.long(), num_top)


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the result of `token_logprobs` for `tokens` [R] int64 of all rows of `logits` [R, V], on any device.

    Needs about two float32 copies of `logits`: split large batches.
    """
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, keepdim=True, dtype=torch.float64).log_()
    norm = largest.double() + total  # log-probability = logit - norm
    ids = tokens[:, None]
    own = logits.gather(-1, ids)
    ranks = (logits > own).count_nonzero(-1) + 1
    equals = logits == own
    if int(equals.count_nonzero()) > len(logits):
        before = torch.arange(logits.shape[1], device=logits.device) < ids
        ranks += (equals & before).count_nonzero(-1)
    parts = [own - norm, ranks[:, None].double()]
    count = min(num_top, logits.shape[1])
    if count:
        values, top = _top_tokens(logits, count)
        parts += [top.double(), values - norm]
    if count < num_top:
        parts[2:] = [torch.nn.functional.pad(part, (0, num_top - count), value=-1.0) for part in parts[2:]]
    return torch.cat(parts, -1)


def _top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest values of each row of `logits` [R, V], and their tokens. Ties are ordered by id."""
    # topk breaks ties arbitrarily: consider all tokens equal to its last one.
    least = logits.topk(count, sorted=True).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)  # by row, then id
    values = logits[rows, ids]
    of_row = rows.cpu().numpy()
    order = np.lexsort((-values.cpu().numpy(), of_row))
    first = np.searchsorted(of_row, np.arange(len(logits)))
    chosen = torch.from_numpy(order[first[:, None] + np.arange(count)]).to(logits.device)
    return values[chosen], ids[chosen]
