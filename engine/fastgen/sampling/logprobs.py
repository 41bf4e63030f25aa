"""Log-probabilities and ranks of tokens."""

from __future__ import annotations

from collections import abc

import numpy as np
import torch

from fastgen.core.step_output import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability and rank of one token per row of `logits` [R, vocabulary], and the row's top tokens.

    The softmax is computed in float32 and summed in float64. Ties rank by token id. Needs about two float32 copies of
    `logits`: split large batches.

    Args:
        logits: any floating type, any device.
        token_ids: [R].
        top: [R], number of top tokens to return per row.
    """
    assert len(logits) == len(token_ids) == len(top)
    if not len(logits):
        return []
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1, keepdim=True, dtype=torch.float64).log_()
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(-1, ids)
    ranks = (logits > own).count_nonzero(-1) + 1
    equals = logits == own
    if int(equals.count_nonzero()) > len(logits):
        before = torch.arange(logits.shape[1], device=logits.device) < ids
        ranks += (equals & before).count_nonzero(-1)
    norm = largest.double() + total  # log-probability = logit - norm
    top_tokens = _top_tokens(logits, norm, max(top))
    return [
        TokenLogprobs(token, logprob, rank, tuple(named[:count]))
        for token, logprob, rank, named, count in zip(
            token_ids, (own - norm).squeeze(-1).tolist(), ranks.tolist(), top_tokens, top, strict=True
        )
    ]


def _top_tokens(logits: torch.Tensor, norm: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` most probable tokens of each row and their log-probabilities. Ties are ordered by id."""
    if count == 0:
        return [[] for _ in logits]
    count = min(count, logits.shape[1])
    # topk breaks ties arbitrarily: consider all tokens equal to its last one.
    least = logits.topk(count, sorted=True).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)
    values = (logits[rows, ids] - norm.squeeze(-1)[rows]).cpu().numpy()
    of_row, of_token = rows.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((of_token, -values, of_row))
    first = np.searchsorted(of_row, np.arange(len(logits)))
    indices = order[first[:, None] + np.arange(count)]
    return [
        list(zip(tokens, row_values, strict=True))
        for tokens, row_values in zip(of_token[indices].tolist(), values[indices].tolist(), strict=True)
    ]
