"""Which replica has computed which prefixes, from what was sent to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


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

    def __len__(self) -> int:
        return len(self._replicas)

    def matches(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many leading hashes each replica has; replicas with none are left out."""
        found: dict[str, int] = {}
        having, count = -1, 0
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
            taken = sum(self._bits.values())
            bit = self._bits[replica] = ~taken & (taken + 1)  # the lowest free one
        # The last block first: the first ones, which most prompts share, are forgotten last.
        for block in reversed(hashes):
            self._replicas[block] = self._replicas.pop(block, 0) | bit
        while len(self._replicas) > self.limit:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget a replica."""
        bit = self._bits.pop(replica, 0)
        if bit:
            rest = ((block, having & ~bit) for block, having in self._replicas.items())
            self._replicas = OrderedDict((block, having) for block, having in rest if having)

    def _note(self, found: dict[str, int], having: int, count: int) -> None:
        for replica, bit in self._bits.items():
            if having & bit:
                found[replica] = count
