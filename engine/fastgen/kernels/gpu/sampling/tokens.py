"""Operators that turn processed logits into tokens.

See `columns.py` for the state they share.
"""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.operators import operator
from fastgen.kernels.gpu.sampling.columns import Column, used_rows
from fastgen.kernels.gpu.sampling.top_k_top_p import choose_tokens


@operator(mutates=("scores",))
def sample_tokens(
    logits: torch.Tensor,
    scores: torch.Tensor,
    is_changed: torch.Tensor,
    chunk_max: torch.Tensor,  # noqa: ARG001
    chunk_sum: torch.Tensor,  # noqa: ARG001
    group_max: torch.Tensor,  # noqa: ARG001
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Return a token [R] int32 for each row.

    In greedy rows it is the first of the largest scores, otherwise a random one. The filters and the order in which the
    inverse transform walks the tokens are those of `top_k_top_p.py`:

    - Without filters, tokens are drawn in the order of their ids.
    - If top-k, top-p and min-p keep fewer than `TOP` tokens, and top-k is off or at most `TOP`, in descending order of
      their scores; ties by id.
    - With other filters, typical-p among them, in the order of ids. Ties with the last kept token are kept.

    The uniform number is SplitMix64 of (seed, position). Weights are float32 and their sums float64; weights of the top
    tokens are float64. Other tokens cost one conversion and one addition in float64 per pass over them, because
    consumer GPUs compute float64 at 1/64 of the float32 rate.

    Args:
        logits: [R, V] float32, as for `process_logits`: the scores of rows that are not changed.
        scores, is_changed, chunk_max, chunk_sum, group_max: of `process_logits`; `scores` are unspecified afterwards.
        slots: [R] int32; a padded row (-1) gets token 0.
        positions: [R] int32.
        columns: [slots, len(Column)] int64.
    """
    tokens = torch.zeros(len(scores), dtype=torch.int32)
    used, slot_of = used_rows(slots)
    if used:
        parameters, own = columns.numpy()[slot_of], positions[used].numpy()
        of_row = torch.where(is_changed[used, None] != 0, scores[used], logits[used])
        chosen = choose_tokens(of_row, parameters, own, rows_at_once=len(used))
        tokens[used] = chosen.int()
    return tokens


@operator(mutates=("lists", "counts", "last_tokens"))
def commit_tokens(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Record the sampled `tokens` [R] int32 in the state of their slots.

    `counts`, `lists` and `last_tokens` [slots] int32 are changed in place. A slot appears at most once in `slots`. See
    `process_logits` for the other arguments.
    """
    for token, slot, position in zip(tokens.tolist(), slots.tolist(), positions.tolist(), strict=True):
        if slot < 0:
            continue
        parameters = columns[slot].tolist()
        last_tokens[slot] = token
        if parameters[Column.COUNT_ROW] >= 0:
            counts[parameters[Column.COUNT_ROW], token] += 2
        if parameters[Column.RING_LENGTH]:
            num_generated = position - parameters[Column.NUM_PROMPT_TOKENS]
            lists[parameters[Column.RING] + num_generated % parameters[Column.RING_LENGTH]] = token
