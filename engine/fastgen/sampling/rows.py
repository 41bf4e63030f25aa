"""Rows of a batch of logits: subsets and slices."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def row_slices(rows: list[int], size: int) -> Iterator[list[int]]:
    """Yield `rows` in lists of at most `size`."""
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def take_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return ascending, non-empty `rows` of `logits`, as a view if they are contiguous."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]
