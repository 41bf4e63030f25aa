"""Owns the KV of sequences, in cache blocks, in host blocks or nowhere, and their recurrent states in slots."""

from __future__ import annotations

from collections import abc

from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.blocks.preemption import Preemption
from fastgen.core.blocks.prefix_cache import BlockKey
from fastgen.core.blocks.state_pool import StateSave
from fastgen.core.blocks.window_pool import LEFT
from fastgen.core.sequence import UNKNOWN, Sequence

# (cache block, host block) pairs to copy.
Copies = list[tuple[int, int]]


class KVCacheManager:
    """Allocates, swaps, preempts, shares and frees the KV blocks of sequences."""

    def __init__(self, pool: BlockPool, host: HostBuffer, preemption: Preemption) -> None:
        self.pool = pool
        self._host = host
        self._preemption = preemption
        self.window = pool.window
        assert not (self.has_states and host.num_free), "recurrent states are not swapped"
        assert self.window is None or not (self.has_states or host.num_free), "blocks of windows are not swapped"

    @property
    def num_free(self) -> int:
        """Number of blocks that a sequence can be given: of two groups of layers, the lower number."""
        free = self.pool.num_free
        return free if self.window is None else min(free, self.window.num_free)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Append blocks until a running sequence has room for `num_tokens` tokens."""
        self.pool.extend(sequence.block_table, num_tokens)
        if self.window is not None:
            self.window.extend(sequence.window_table, len(sequence.block_table))

    def token_capacity(self, sequence: Sequence, num_computed: int) -> int:
        """Return how many tokens a running sequence with `num_computed` tokens could add now."""
        return (len(sequence.block_table) + self.num_free) * self.pool.block_size - num_computed

    def has_room(self, sequence: Sequence, table: list[int], others: abc.Iterable[Sequence], num_spare: int) -> bool:
        """Return whether a waiting sequence with the cached blocks of `table` fits whole.

        Args:
            sequence: the sequence, after `match_prefix`.
            table: what that returned.
            others: sequences that must fit whole, too.
            num_spare: further blocks to leave free.
        """
        pool, window = self.pool, self.window
        needed = pool.blocks_for(len(sequence.tokens)) - len(table) + num_spare
        needed += sum(pool.blocks_for(len(other.tokens)) - len(other.block_table) for other in others)
        if window is None or needed > pool.num_free:
            return needed <= pool.num_free
        missing = [window.blocks_for(len(each.tokens)) - _num_in_window(each) for each in (sequence, *others)]
        return sum(max(0, count) for count in missing) + num_spare <= window.num_free

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached leading blocks of a waiting sequence, with a reference to each.

        At least one token is left to compute, so that there are logits to sample from. Empty if the sequence shares no
        blocks, or if all its prompt tokens must be computed and it is not swapped out. For a swapped sequence, these
        blocks need not be copied back.

        Of a model with recurrent states, they are the blocks up to the last one with a snapshot. Where layers with a
        window have their own blocks, they are those after which the last window is cached, and its blocks are in
        `window_table`. Call `allocate`, `swap_in` or `release_match` next.
        """
        if sequence.cache_salt is None:
            return []
        table = self.pool.match(sequence.tokens, sequence.cache_salt, self._num_cacheable(sequence))
        if self.has_states:
            num_matched = len(table)
            while table and not self.pool.states.has_snapshot(table[-1]):
                self.pool.release([table.pop()])
            sequence.branch = num_matched * self.pool.block_size if len(table) < num_matched else 0
        if self.window is not None:
            unused = table[self.window.usable(table) :]
            del table[len(table) - len(unused) :]
            self.pool.release(unused)
            sequence.window_table = self.window.match(table)
            sequence.num_left_blocks = self.window.first_needed(len(table) * self.pool.block_size)
        return table

    def release_match(self, sequence: Sequence, table: list[int]) -> None:
        """Drop the references that `match_prefix` took for a sequence that still waits."""
        self.pool.release(table)
        self._release_window(sequence)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return self.pool.states.num_slots > 0

    def has_slots(self, sequence: Sequence, table: list[int]) -> bool:
        """Return whether there are slots to start a waiting sequence after the cached blocks of `table`."""
        return not self.has_states or self.pool.states.has_room(_num_slots(sequence), table[-1] if table else None)

    def next_key(self, sequence: Sequence, table: list[int]) -> BlockKey | None:
        """Return the key of the block after those of `table`, or None if that block cannot be shared."""
        if sequence.cache_salt is None or len(table) >= self._num_cacheable(sequence):
            return None
        return self.pool.key(table, sequence.tokens, sequence.cache_salt, len(table))

    def allocate(self, sequence: Sequence, table: list[int]) -> None:
        """Start a waiting sequence with the cached blocks of `table`."""
        assert not sequence.host_blocks
        sequence.num_computed_tokens = len(table) * self.pool.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.block_table = table
        sequence.num_published_blocks = len(table)
        if self.has_states:
            states = self.pool.states
            sequence.state_source = states.pin(table[-1]) if table else None
            sequence.state_slot = states.take()
            if _num_slots(sequence) > 1:
                sequence.spare_slot = states.take()

    def swap_in(self, sequence: Sequence, table: list[int]) -> Copies:
        """Start a swapped sequence with the cached blocks of `table`; return the copies to make of the others."""
        num_cached = len(table)
        self.pool.extend(table, sequence.num_computed_tokens)
        copies = list(zip(table[num_cached:], sequence.host_blocks[num_cached:], strict=True))
        self._host.release(sequence.host_blocks)
        sequence.block_table = table
        sequence.num_published_blocks = num_cached
        return copies

    def preempt(self, victim: Sequence) -> Copies:
        """Free the cache blocks of a running sequence; return the copies to make if it is swapped out, or none."""
        copies: Copies = []
        num_shared = self.pool.num_shared(victim.block_table)
        if self._preemption.should_swap(victim, num_shared, self.pool.block_size, self._host):
            victim.host_blocks = self._host.allocate(len(victim.block_table))
            copies += zip(victim.block_table, victim.host_blocks, strict=True)
        else:
            victim.num_computed_tokens = 0
        self._release_blocks(victim)
        victim.num_preemptions += 1
        return copies

    def publish(self, sequence: Sequence, num_computed: int) -> list[int]:
        """Add the full blocks among the first `num_computed` tokens of a sequence to the prefix cache.

        Returns the sequence's blocks that were replaced by equal cached ones. The caller releases them.
        """
        if sequence.cache_salt is None:
            return []
        num_full = num_computed // self.pool.block_size
        first = sequence.num_published_blocks
        replaced = self.pool.publish(
            sequence.block_table, sequence.tokens, sequence.cache_salt, sequence.num_published_blocks, num_full
        )
        if replaced:
            sequence.resend_blocks(min(replaced))
        sequence.num_published_blocks = num_full
        if self.window is not None:
            for index in range(first, num_full):
                self.window.publish(sequence.block_table[index], sequence.window_table[index])
        return list(replaced.values())

    def leave_window(self, sequence: Sequence, num_computed: int) -> None:
        """Free the blocks that a sequence of which a step has computed `num_computed` tokens no longer reads.

        Steps in flight may read them only if they compute earlier tokens. Call `publish` first.
        """
        if self.window is None:
            return
        end = self.window.first_needed(num_computed)
        if end > sequence.num_left_blocks:
            self.window.leave(sequence.window_table, sequence.num_left_blocks, end)
            sequence.num_left_blocks = end

    def save_states(self, sequence: Sequence, end: int, *, samples: bool) -> list[StateSave]:
        """Return the copies of states to make while the next step computes the tokens of a sequence up to `end`."""
        saves: list[StateSave] = []
        if sequence.spare_slot is not None and samples:
            saves.append(StateSave(sequence, end - 1, sequence.spare_slot, is_snapshot=False))
        for place in self._snapshot_places(sequence, sequence.num_computed_tokens, end):
            if self.pool.states.num_available:
                saves.append(StateSave(sequence, place, self.pool.states.take(), is_snapshot=True))
        return saves

    def start_state(self, sequence: Sequence) -> int | None:
        """Return the slot from which the next step reads the states of a sequence, or None if it is its own."""
        source, sequence.state_source = sequence.state_source, None
        return source

    def _snapshot_places(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Return the block boundaries, in tokens, at which a chunk takes snapshots.

        They are the last one from which the same tokens could be continued, and the one where cached blocks ended that
        had no snapshot: other prompts may begin with these blocks, too.
        """
        if sequence.cache_salt is None:
            return []
        last = min(end, len(sequence.tokens) - 1) // self.pool.block_size * self.pool.block_size
        # A prompt had the snapshot at its start before. A decode gets there token by token.
        first = start if sequence.is_decoding and sequence.state_source is None else start + 1
        return sorted(place for place in {sequence.branch, last} if first <= place <= end)

    def add_snapshot(self, save: StateSave) -> None:
        """Keep the snapshot that a settled step took, if its block is cached.

        It replaces the one that the sequence took before, unless that is the last one of its prompt or at its branch:
        others are likely to start there.
        """
        sequence, states, size = save.sequence, self.pool.states, self.pool.block_size
        if save.num_tokens > sequence.num_published_blocks * size:
            states.release(save.slot)
            return
        before, table = sequence.num_snapshot_tokens, sequence.block_table
        is_own = states.add_snapshot(table[save.num_tokens // size - 1], save.slot)
        last_of_prompt = (sequence.num_prompt_tokens - 1) // size * size
        if before not in (0, last_of_prompt, sequence.branch):
            states.drop_snapshot(table[before // size - 1])
        sequence.num_snapshot_tokens = save.num_tokens if is_own else 0

    def restore_state(self, sequence: Sequence) -> None:
        """Have the next step start from the states before the token that was computed last: it is computed again."""
        if self.has_states:
            assert sequence.spare_slot is not None, "only tokens sampled by a grammar are computed again"
            sequence.state_source = sequence.spare_slot

    def truncate(self, sequence: Sequence) -> None:
        """Free the blocks beyond the computed tokens of a sequence."""
        num_kept = self.pool.blocks_for(sequence.num_computed_tokens)
        beyond = sequence.block_table[num_kept:]
        del sequence.block_table[num_kept:]
        sequence.resend_blocks(num_kept)
        self.pool.release(beyond)
        if self.window is not None:
            beyond = sequence.window_table[num_kept:]
            del sequence.window_table[num_kept:]
            self.window.release(beyond)

    def drop(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, in the cache and on the host; its KV will be recomputed."""
        self.free(sequence)
        sequence.num_computed_tokens = 0

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, in the cache and on the host."""
        self._release_blocks(sequence)
        self._host.release(sequence.host_blocks)

    def check_integrity(
        self,
        running: abc.Sequence[Sequence],
        waiting: abc.Sequence[Sequence],
        ended: abc.Sequence[Sequence],
        replaced: abc.Iterable[list[int]],
        saves: abc.Iterable[StateSave],
    ) -> None:
        """Assert the invariants that hold between steps.

        Steps in flight compute the sequences that `ended`, may read the blocks that were `replaced`, and make `saves`.
        """
        slots = [slot for sequence in (*running, *ended) for slot in _slots(sequence)]
        slots += [save.slot for save in saves if save.is_snapshot]
        held = [*running, *ended]
        self.pool.check_integrity(
            [*(sequence.block_table for sequence in held), *replaced],
            slots,
            [sequence.window_table for sequence in held],
        )
        self._host.check_integrity([sequence.host_blocks for sequence in waiting])
        for sequence in running:
            assert 0 < sequence.num_computed_tokens <= len(sequence.tokens) - (sequence.pooling is None)
            assert len(sequence.block_table) == self.pool.blocks_for(sequence.num_computed_tokens)
            assert not sequence.host_blocks
            self._check_window(sequence)
            assert len(_slots(sequence)) == (_num_slots(sequence) if self.has_states else 0)
            room = len(sequence.block_table) * self.pool.block_size
            assert sequence.decodes_until in (0, min(room, sequence.max_length - 1))
            if sequence.cache_salt is not None and not sequence.num_in_flight:
                assert sequence.num_published_blocks == sequence.num_computed_tokens // self.pool.block_size
        for sequence in waiting:
            assert sequence.is_waiting
            assert not _slots(sequence)
            assert not sequence.window_table
            assert not sequence.decodes_until
            assert UNKNOWN not in sequence.tokens[-1:]
            assert len(sequence.host_blocks) == self.pool.blocks_for(sequence.num_computed_tokens)
        assert all(sequence.num_in_flight and sequence.block_table for sequence in ended)

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Return how many leading full blocks a waiting sequence could take from the prefix cache."""
        if sequence.host_blocks:
            return sequence.num_computed_tokens // self.pool.block_size
        if sequence.needs_all_tokens:
            return 0
        return (len(sequence.tokens) - 1) // self.pool.block_size

    def _check_window(self, sequence: Sequence) -> None:
        """Assert that a running sequence holds the blocks that its window may still reach, and no earlier ones."""
        if self.window is None:
            assert not sequence.window_table
            return
        table, num_left = sequence.window_table, sequence.num_left_blocks
        assert len(table) == len(sequence.block_table)
        assert [block == LEFT for block in table] == [index < num_left for index in range(len(table))]
        assert num_left <= self.window.first_needed(sequence.num_computed_tokens)

    def _release_window(self, sequence: Sequence) -> None:
        if self.window is not None:
            self.window.release(sequence.window_table)
            sequence.num_left_blocks = 0

    def _release_blocks(self, sequence: Sequence) -> None:
        for slot in _slots(sequence):
            self.pool.states.release(slot)
        sequence.state_slot = sequence.spare_slot = sequence.state_source = None
        sequence.num_snapshot_tokens = 0
        self.pool.release(sequence.block_table)
        self._release_window(sequence)
        sequence.num_published_blocks = 0
        sequence.resend_blocks(0)


def _num_in_window(sequence: Sequence) -> int:
    """Return how many blocks of layers with a window a sequence holds."""
    return len(sequence.window_table) - sequence.num_left_blocks


def _num_slots(sequence: Sequence) -> int:
    """Return how many slots of recurrent states a sequence needs."""
    return 1 if sequence.constraint is None else 2


def _slots(sequence: Sequence) -> list[int]:
    """Return the slots of recurrent states that a sequence holds."""
    return [slot for slot in (sequence.state_slot, sequence.spare_slot) if slot is not None]
