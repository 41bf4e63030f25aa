"""How likely tokens were."""

from __future__ import annotations

from collections import abc

import numpy as np
import torch

from fastgen.core.step_output import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of a token in each row of `logits` [R, vocabulary], and the row's likeliest tokens.

    The softmax is taken in float32 and summed in float64. Of equally likely tokens the one with the smaller id ranks
    first. Takes about two float32 copies of `logits`: callers with many rows come with a few at a time.

    Args:
        logits: of any floating type, on any device.
        token_ids: [R].
        top: [R], how many of the likeliest tokens to name in each row.
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
    norm = largest.double() + total  # a token's log-probability is its logit less this
    likeliest = _likeliest(logits, norm, max(top))
    return [
        TokenLogprobs(token, logprob, rank, tuple(named[:count]))
        for token, logprob, rank, named, count in zip(
            token_ids, (own - norm).squeeze(-1).tolist(), ranks.tolist(), likeliest, top, strict=True
        )
    ]


def _likeliest(logits: torch.Tensor, norm: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of each row with their log-probabilities, ties in order of their ids."""
    if count == 0:
        return [[] for _ in logits]
    count = min(count, logits.shape[1])
    # topk may take any of several equals: all tokens as likely as its last one are candidates.
    least = logits.topk(count, sorted=True).values[:, -1:]
    rows, ids = (logits >= least).nonzero(as_tuple=True)
    values = (logits[rows, ids] - norm.squeeze(-1)[rows]).cpu().numpy()
    of_row, of_token = rows.cpu().numpy(), ids.cpu().numpy()
    order = np.lexsort((of_token, -values, of_row))
    first = np.searchsorted(of_row, np.arange(len(logits)))
    places = order[first[:, None] + np.arange(count)]
    return [
        list(zip(tokens, row_values, strict=True))
        for tokens, row_values in zip(of_token[places].tolist(), values[places].tolist(), strict=True)
    ]
