"""The pool of slots for recurrent states.

A layer with linear attention has one state for a whole sequence, which each token changes. So it cannot be shared like
KV blocks, nor read again after a later token. The prefix cache has snapshots: copies of the states of all layers after
a full cached block. See docs/decisions/065.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from dataclasses import dataclass

from fastgen.core.sequence import Sequence

# Source of the state of a sequence without computed tokens.
NO_STATE = -1


@dataclass(frozen=True, slots=True)
class StateSave:
    """Copies the recurrent states of a sequence after its first `num_tokens` tokens, which a step passes, to a slot.

    Attributes:
        is_snapshot: whether it is for the prefix cache, and not for the sequence itself.
    """

    sequence: Sequence
    num_tokens: int
    slot: int
    is_snapshot: bool


class StatePool:
    """Allocates slots `0 .. num_slots - 1`. Each has the states of all layers of one sequence.

    A slot is held by a sequence, or written by a step in flight that takes a snapshot, or it has the snapshot of a
    cached block, or it is free. Snapshots are evicted for other slots, the least recently used first.

    Args:
        num_slots: 0 for a model without recurrent states, otherwise at least `LEAST_SLOTS`.
    """

    # Two for a sequence with a grammar, and one for the snapshot from which it starts.
    LEAST_SLOTS = 3

    def __init__(self, num_slots: int) -> None:
        assert num_slots == 0 or num_slots >= self.LEAST_SLOTS
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # slot by cached block, least recently used first
        self._pinned: set[int] = set()  # blocks whose snapshots the step that is being planned reads

    @property
    def num_available(self) -> int:
        """Slots that can be taken: free ones, and those of snapshots that are not pinned."""
        return len(self._free) + len(self._snapshots) - len(self._pinned)

    @property
    def num_snapshots(self) -> int:
        """Cached blocks with a snapshot."""
        return len(self._snapshots)

    def has_snapshot(self, block: int) -> bool:
        """Return whether there is a snapshot of the states after a cached block."""
        return block in self._snapshots

    def has_room(self, num_slots: int, block: int | None) -> bool:
        """Return whether `num_slots` can be taken while the snapshot of `block`, which will be read, is kept."""
        reads_another = block is not None and block not in self._pinned
        return self.num_available - reads_another >= num_slots

    def pin(self, block: int) -> int:
        """Return the slot of a block's snapshot, which is not evicted until `unpin`: the next step reads it."""
        self._snapshots.move_to_end(block)
        self._pinned.add(block)
        return self._snapshots[block]

    def unpin(self) -> None:
        """Let all snapshots be evicted again: later steps write a slot only after this one has read it."""
        self._pinned.clear()

    def take(self) -> int:
        """Return a slot; the caller has checked that one is available."""
        if self._free:
            return self._free.pop()
        block, slot = self._snapshots.popitem(last=False)
        assert block not in self._pinned, "those are the most recently used"
        return slot

    def release(self, slot: int) -> None:
        """Take back a slot."""
        self._free.append(slot)

    def add_snapshot(self, block: int, slot: int) -> bool:
        """Make `slot` the snapshot of a cached block. If it has one already, take the slot back and return False."""
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
            self.release(slot)
            return False
        self._snapshots[block] = slot
        return True

    def drop_snapshot(self, block: int) -> None:
        """Free the snapshot of a block, if it has one."""
        slot = self._snapshots.pop(block, None)
        if slot is not None:
            assert block not in self._pinned
            self.release(slot)

    def check_integrity(self, held: abc.Iterable[int], is_cached: abc.Callable[[int], bool]) -> None:
        """Assert that every slot is free, a snapshot of a cached block, or exactly once in `held`."""
        accounted = sorted([*held, *self._free, *self._snapshots.values()])
        assert accounted == list(range(self.num_slots)), "a slot of states is lost or held twice"
        assert all(map(is_cached, self._snapshots)), "a snapshot outlived its block"
        assert not self._pinned, "a snapshot is pinned between steps"
