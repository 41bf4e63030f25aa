"""Owns the KV of sequences: in cache blocks, in host blocks, or nowhere."""

from __future__ import annotations

from collections import abc

from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.blocks.preemption import Preemption
from fastgen.core.blocks.prefix_cache import BlockKey
from fastgen.core.sequence import UNKNOWN, Sequence

# (cache block, host block) pairs to copy.
Copies = list[tuple[int, int]]


class KVCacheManager:
    """Allocates, swaps, preempts, shares and frees the KV blocks of sequences."""

    def __init__(self, pool: BlockPool, host: HostBuffer, preemption: Preemption) -> None:
        self.pool = pool
        self._host = host
        self._preemption = preemption

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached leading blocks of a waiting sequence, with a reference to each.

        At least one token is left to compute, so that there are logits to sample from. Empty if the sequence shares no
        blocks, or if all its prompt tokens must be computed and it is not swapped out. For a swapped sequence, these
        blocks need not be copied back.
        """
        if sequence.cache_salt is None:
            return []
        return self.pool.match(sequence.tokens, sequence.cache_salt, self._num_cacheable(sequence))

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
        replaced = self.pool.publish(
            sequence.block_table, sequence.tokens, sequence.cache_salt, sequence.num_published_blocks, num_full
        )
        if replaced:
            sequence.resend_blocks(min(replaced))
        sequence.num_published_blocks = num_full
        return list(replaced.values())

    def truncate(self, sequence: Sequence) -> None:
        """Free the blocks beyond the computed tokens of a sequence."""
        num_kept = self.pool.blocks_for(sequence.num_computed_tokens)
        beyond = sequence.block_table[num_kept:]
        del sequence.block_table[num_kept:]
        sequence.resend_blocks(num_kept)
        self.pool.release(beyond)

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
    ) -> None:
        """Assert the invariants that hold between steps.

        Steps in flight compute the sequences that `ended`, and may read the blocks that were `replaced`.
        """
        self.pool.check_integrity([*(sequence.block_table for sequence in (*running, *ended)), *replaced])
        self._host.check_integrity([sequence.host_blocks for sequence in waiting])
        for sequence in running:
            assert 0 < sequence.num_computed_tokens <= len(sequence.tokens) - (sequence.pooling is None)
            assert len(sequence.block_table) == self.pool.blocks_for(sequence.num_computed_tokens)
            assert not sequence.host_blocks
            held = len(sequence.block_table) * self.pool.block_size
            assert sequence.decodes_until in (0, min(held, sequence.max_length - 1))
            if sequence.cache_salt is not None and not sequence.num_in_flight:
                assert sequence.num_published_blocks == sequence.num_computed_tokens // self.pool.block_size
        for sequence in waiting:
            assert sequence.is_waiting
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

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.num_published_blocks = 0
        sequence.resend_blocks(0)
