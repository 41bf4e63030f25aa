"""Log-probabilities and ranks of tokens."""

from __future__ import annotations

from collections import abc

import torch

from fastgen.core.step_output import TokenLogprobs
from fastgen.kernels.gpu.sampling.logprobs import score_tokens


def token_logprobs(logits: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability and rank of one token of each row, and the row's top tokens.

    The softmax is computed in float32 and summed in float64. Ties rank by token id. Needs about two float32 copies of
    `logits`: split large batches.

    Args:
        logits: [R, vocabulary], any floating type, any device.
        token_ids: [R].
        top: [R], number of top tokens to return per row.
    """
    assert len(logits) == len(token_ids) == len(top)
    if not len(logits):
        return []
    packed = score_tokens(logits, torch.tensor(token_ids, device=logits.device), max(top))
    return unpack_logprobs(packed, token_ids, top)


def unpack_logprobs(packed: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Convert the results of the operator `token_logprobs` to Python values on the host.

    Args:
        packed: [Q, 2 + 2 * num_top] float64.
        token_ids: [Q], the tokens that were scored.
        top: [Q], number of top tokens to return per row, at most `num_top`.
    """
    num_top = packed.shape[1] // 2 - 1
    unpacked = []
    for row, token, count in zip(packed.tolist(), token_ids, top, strict=True):
        ids, logprobs = row[2 : 2 + num_top], row[2 + num_top :]
        named = [(int(i), value) for i, value in zip(ids[:count], logprobs[:count], strict=True) if i >= 0]
        unpacked.append(TokenLogprobs(token, row[0], int(row[1]), tuple(named)))
    return unpacked
