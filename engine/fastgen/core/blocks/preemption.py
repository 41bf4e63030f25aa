"""Preemption: which sequence loses its blocks, and whether its KV is recomputed or swapped.

Swapping copies it to the host and back. PagedAttention (Kwon et al., 2023), section 4.5, describes both. Which is
cheaper depends on the model and the machine.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from fastgen.core.blocks.block_pool import HostBuffer
from fastgen.core.sequence import Sequence
from fastgen.core.step_times import StepTimes, StepWork


@dataclass(frozen=True, slots=True)
class Preemption:
    """Decides for each preempted sequence between recomputation and swapping.

    Attributes:
        mode: "recompute", "swap", or "auto" for the cheaper of the two, which is swapping while a time is unknown. A
            sequence is not swapped if the host buffer lacks room for it, or if other sequences keep all its blocks in
            the cache.
        times: predicts how long recomputation takes.
        seconds_per_block: time to copy a block one way; 0 if unknown.
    """

    mode: str
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
        # What the tokens add to steps that run anyway, in small chunks. 0 means unknown, not free.
        costs, start = self.times.coefficients, num_shared * block_size
        pairs = num_recomputed * (start + num_recomputed // 2)
        recomputing = costs.seconds(StepWork(num_recomputed, num_recomputed, pairs)) - costs.base
        return self.mode == "swap" or recomputing <= 0 or swapping <= recomputing


def choose_victim(candidates: abc.Sequence[Sequence]) -> Sequence:
    """Return the sequence to preempt for a block: the lowest-ranked one.

    A victim ranks below the sequence that needs the block, or is that sequence: higher-ranked ones may already be in
    the plan. The highest-ranked running sequence must advance in every step, so it is never the victim while a
    lower-ranked one runs. `candidates` are the sequence that needs the block and those that rank below it, by rank.
    """
    return candidates[-1]
