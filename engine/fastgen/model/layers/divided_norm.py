"""Norms over the heads of all ranks together, of which each rank has a part (OLMo 2 and 3, MiniMax-M2)."""

from __future__ import annotations

import torch

from fastgen.model.layers.rank_group import RankGroup


def normalise_over_ranks(
    qkv: torch.Tensor, query_norm: torch.Tensor, key_norm: torch.Tensor, epsilon: float, group: RankGroup
) -> torch.Tensor:
    """Normalise the queries and the keys of a layer by their RMS over all ranks, in place.

    A key-value head that several ranks hold is counted once for each of them, in the sum of squares and in the width.
    All are held by as many ranks, so the mean is right.

    Args:
        qkv: [T, width of the rank's queries, keys and values].
        query_norm, key_norm: the rank's part of the weights; its size is the width of the queries or keys.
        epsilon: added to the mean of the squares.
        group: the ranks. Each has the same number of query heads and of key-value heads.
    """
    norms = query_norm, key_norm
    queries, keys, _ = torch.tensor_split(qkv, (len(query_norm), len(query_norm) + len(key_norm)), 1)
    squares = torch.stack([part.float().square().sum(1) for part in (queries, keys)])
    for part, norm, total in zip((queries, keys), norms, group.all_reduce(squares), strict=True):
        scale = torch.rsqrt(total / (group.size * len(norm)) + epsilon)
        part.copy_(part.float() * scale[:, None] * norm)
    return qkv
