"""The embedding and the head of a model whose vocabulary is divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.layers.linear import Linear
from fastgen.model.layers.rank_group import RankGroup


class DividedTable:
    """Looks up embeddings, of which each rank has some rows.

    Args:
        table: the rows of this rank.
        own: their numbers.
        group: the ranks.

    Attributes:
        table: the rows of this rank.
    """

    def __init__(self, table: EmbeddingTable, own: range, group: RankGroup) -> None:
        self.table = table
        self._own = own
        self._group = group

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows."""
        return self.look_up(rows, self.table)

    def look_up(self, rows: torch.Tensor, own: EmbeddingTable) -> torch.Tensor:
        """Look up rows with a function that looks up those of `table`.

        The other ranks add zeros, so the sum is exact.
        """
        index = rows - self._own.start
        foreign = (index < 0) | (index >= len(self._own))
        found = own(index.masked_fill(foreign, 0))
        return self._group.all_reduce(found.masked_fill_(foreign[:, None], 0))


class DividedHead:
    """The product with the output head, of which each rank has some rows.

    Args:
        product: with the rows of this rank.
        widths: the number of rows of each rank.
        group: the ranks.
    """

    def __init__(self, product: Linear, widths: Sequence[int], group: RankGroup) -> None:
        self._product = product
        self._widths = widths
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] on rank 0, and [n, 0] on all others."""
        return self._group.gather(self._product(x), self._widths)
