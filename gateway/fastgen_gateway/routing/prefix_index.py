"""Which replica has computed which prefixes, from what was sent to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

# Replicas that may be gone before their bits are cleared, and hashes that are looked at for it with each prompt: to
# clear all at once would stop the picker for a second.
MOST_GONE: Final = 64
_SWEPT: Final = 256


class PrefixIndex:
    """Hashes of prompt prefixes, with the replicas that they were sent to. The least recently sent ones are forgotten.

    Args:
        limit: maximum number of hashes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # The replicas of a hash are the bits of a number.
        self._replicas: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[str, int] = {}
        self._live = 0
        # Bits of replicas that are gone, which may still be set; those that are being cleared, and where.
        self._gone = self._sweeping = 0
        self._unswept: list[int] = []

    def __len__(self) -> int:
        return len(self._replicas)

    def matches(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many leading hashes each replica has; replicas with none are left out."""
        found: dict[str, int] = {}
        having, count = self._live, 0
        for block in hashes:
            still = having & self._replicas.get(block, 0)
            if count and still != having:
                self._note(found, having, count)
            having = still
            if not having:
                return found
            count += 1
        if count:
            self._note(found, having, count)
        return found

    def add(self, hashes: Sequence[int], replica: str) -> None:
        """Record that a prompt was sent to a replica."""
        bit = self._bits.get(replica)
        if bit is None:
            taken = self._live | self._gone
            bit = self._bits[replica] = ~taken & (taken + 1)  # the lowest free one
            self._live |= bit
        # The last block first: the first ones, which most prompts share, are forgotten last.
        for block in reversed(hashes):
            self._replicas[block] = self._replicas.pop(block, 0) | bit
        self.bound(self.limit)
        self._sweep()

    def bound(self, limit: int) -> None:
        """Change the maximum number of hashes."""
        self.limit = limit
        while len(self._replicas) > limit:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget a replica."""
        bit = self._bits.pop(replica, 0)
        self._live &= ~bit
        self._gone |= bit
        if not self._bits:
            self._replicas.clear()
            self._unswept.clear()
            self._gone = self._sweeping = 0

    def _sweep(self) -> None:
        """Clear some of the bits of replicas that are gone, so that they can be used again."""
        if not self._sweeping:
            if self._gone.bit_count() < MOST_GONE:
                return
            self._sweeping, self._unswept = self._gone, list(self._replicas)
        for block in self._unswept[-_SWEPT:]:
            if (having := self._replicas.get(block, 0)) & self._sweeping:
                self._replicas[block] = having & ~self._sweeping
                if not self._replicas[block]:
                    del self._replicas[block]
        del self._unswept[-_SWEPT:]
        if not self._unswept:
            self._gone &= ~self._sweeping
            self._sweeping = 0

    def _note(self, found: dict[str, int], having: int, count: int) -> None:
        for replica, bit in self._bits.items():
            if having & bit:
                found[replica] = count
