"""How a sequence makes room: its blocks are dropped and computed again, or copied to the host and back.

PagedAttention (Kwon et al., 2023), section 4.5, has both. Which is cheaper depends on the model and the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepTimes


class HostBuffer:
    """Blocks of host memory that blocks of the cache are copied to. Each is held by one swapped sequence at most."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Blocks for a sequence. The caller has made sure that they are there."""
        assert 1 <= num_blocks <= self.num_free
        return [self._free.pop() for _ in range(num_blocks)]

    def release(self, blocks: list[int]) -> None:
        """Takes blocks back and empties `blocks`."""
        self._free.extend(reversed(blocks))
        blocks.clear()

    def check_integrity(self, held: list[list[int]]) -> None:
        """Asserts that every block is free or in exactly one of `held`."""
        everything = sorted([block for blocks in held for block in blocks] + self._free)
        assert everything == list(range(self.num_blocks)), "a host block is lost or held twice"


@dataclass(frozen=True, slots=True)
class Preemption:
    """Chooses for each victim.

    Attributes:
        mode: "recompute" or "swap" for always that way ("swap" as far as the host buffer goes), "auto" for the cheaper.
        times: what recomputing takes.
        seconds_per_block: what copying a block one way takes; 0 where it is not known.
    """

    mode: Literal["auto", "recompute", "swap"]
    times: StepTimes
    seconds_per_block: float = 0.0

    def swaps(self, victim: Sequence, num_shared: int, block_size: int, host: HostBuffer) -> bool:
        """Is `victim` swapped out? `num_shared` of its blocks others hold too, so these stay in the cache for now."""
        num_blocks = len(victim.block_table)
        num_again = victim.num_computed_tokens - num_shared * block_size
        if self.mode == "recompute" or num_blocks > host.num_free or num_again <= 0:
            return False
        # Shared blocks are copied as well, as they may be gone by then; but not back, where the cache has kept them.
        swapping = (2 * num_blocks - num_shared) * self.seconds_per_block
        # What the tokens add to passes that are made anyway. While it is unknown, nothing says that it is little.
        recomputing = self.times.seconds(num_again, num_again) - self.times.seconds(0, 0)
        return self.mode == "swap" or recomputing <= 0 or swapping <= recomputing
