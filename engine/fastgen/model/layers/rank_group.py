"""The ranks of a model that is divided among several processes, and what they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class RankGroup(Protocol):
    """The group as one of its ranks sees it. All ranks must call the same methods in the same order.

    Attributes:
        rank: number of this rank. Rank 0 samples.
        size: number of ranks.

    Raises:
        GroupBroken: by every method, if another rank has ended.
    """

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, computed in place."""

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Concatenate the columns of all ranks' matrices.

        Args:
            x: [n, columns].
            widths: the number of columns of each rank.

        Returns:
            [n, sum of widths] on rank 0, and [n, 0] on all others.
        """

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, written to `x` on all other ranks."""

    def agree(self, value: int) -> int:
        """Return the least value of all ranks."""


class _OneRank:
    """The group of a model that is not divided; see `RankGroup`."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:  # noqa: ARG002 (as in the protocol)
        """Return the matrix."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return x

    def agree(self, value: int) -> int:
        """Return the value."""
        return value


ONE_RANK = _OneRank()
