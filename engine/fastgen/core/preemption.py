"""Preemption: which sequence loses its blocks, and what happens to its KV.

The KV is dropped and recomputed, or swapped to the host and back. PagedAttention (Kwon et al., 2023), section 4.5,
describes both. Which is cheaper depends on the model and the machine.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Literal

from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepTimes


class HostBuffer:
    """Blocks of host memory for swapped sequences. Each belongs to at most one sequence."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks for a sequence; the caller has checked that there are enough."""
        assert 1 <= num_blocks <= self.num_free
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        """Take back `blocks` and empty the list."""
        self._free.extend(reversed(blocks))
        blocks.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Assert that every block is free or in exactly one of `tables`."""
        accounted = sorted([block for table in tables for block in table] + self._free)
        assert accounted == list(range(self.num_blocks)), "a host block is lost or held twice"


@dataclass(frozen=True, slots=True)
class Preemption:
    """Decides for each preempted sequence between recomputation and swapping.

    Attributes:
        mode: "recompute", "swap" (while the host buffer has room), or "auto" for the cheaper of the two.
        times: predicts how long recomputation takes.
        seconds_per_block: time to copy a block one way; 0 if unknown.
    """

    mode: Literal["auto", "recompute", "swap"]
    times: StepTimes
    seconds_per_block: float = 0.0

    def should_swap(self, victim: Sequence, num_shared: int, block_size: int, host: HostBuffer) -> bool:
        """Return whether to swap `victim` out; other sequences keep `num_shared` of its blocks in the cache."""
        num_blocks = len(victim.block_table)
        num_recomputed = victim.num_computed_tokens - num_shared * block_size
        if self.mode == "recompute" or num_blocks > host.num_free or num_recomputed <= 0:
            return False
        # Shared blocks are copied out too, because they may be evicted meanwhile, but copied back only if they were.
        swapping = (2 * num_blocks - num_shared) * self.seconds_per_block
        # What the tokens add to steps that run anyway. 0 means unknown, not free.
        recomputing = self.times.seconds(num_recomputed, num_recomputed) - self.times.seconds(0, 0)
        return self.mode == "swap" or recomputing <= 0 or swapping <= recomputing


def choose_victim(candidates: abc.Sequence[Sequence]) -> Sequence:
    """Return the sequence to preempt for a block: the lowest-ranked one.

    A victim ranks below the sequence that needs the block, or is that sequence: higher-ranked ones may already be in
    the plan. The highest-ranked running sequence must advance in every step, so it is never the victim while a
    lower-ranked one runs.

    Args:
        candidates: the sequence that needs the block, and the running ones that rank below it, by rank.
    """
    return candidates[-1]
