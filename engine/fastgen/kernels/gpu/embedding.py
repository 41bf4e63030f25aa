"""Operator of the embedding lookup."""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.operators import operator


@operator()
def embed(
    table: torch.Tensor, token_ids: torch.Tensor, last_ids: torch.Tensor, source_rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """Look up and scale the embeddings of a step's tokens in one launch.

    Args:
        table: [vocabulary, hidden], contiguous; bfloat16, float16 or float32.
        token_ids: [T] int32; -1 stands for the token sampled last in the row's sequence.
        last_ids: [rows of device state] int32 or int64, the tokens sampled last.
        source_rows: [T] int32, row of `last_ids`; read only where the token id is -1.
        scale: factor, rounded to the table's dtype.

    Returns:
        [T, hidden] in the table's dtype.
    """
    is_last = token_ids < 0
    ids = token_ids.long()
    ids[is_last] = last_ids[source_rows[is_last].long()].long()
    return table[ids] * torch.tensor(scale, dtype=table.dtype, device=table.device)
