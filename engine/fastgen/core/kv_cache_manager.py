"""Owns the KV of sequences: in cache blocks, in host blocks, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable

from fastgen.core.block_pool import BlockPool
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlanBuilder


class KVCacheManager:
    """Allocates, swaps, preempts, shares and frees the KV blocks of sequences."""

    def __init__(self, pool: BlockPool, host: HostBuffer, preemption: Preemption) -> None:
        self.pool = pool
        self._host = host
        self._preemption = preemption

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached leading blocks of a waiting sequence, with a reference to each.

        At least one token is left to compute, so that there are logits to sample from.
        """
        if sequence.cache_salt is None:
            return []
        return self.pool.match(sequence.tokens, sequence.cache_salt, self._num_cacheable(sequence))

    def is_next_computed(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Return whether another sequence computes the next uncached block in this step."""
        if sequence.cache_salt is None or len(table) >= self._num_cacheable(sequence):
            return False
        return builder.computes(self.pool.key(table, sequence.tokens, sequence.cache_salt, len(table)))

    def allocate(self, sequence: Sequence, table: list[int]) -> None:
        """Start a waiting sequence with the cached blocks of `table`."""
        assert not sequence.host_blocks
        sequence.num_computed_tokens = len(table) * self.pool.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.block_table = table
        sequence.num_published_blocks = len(table)

    def swap_in(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> None:
        """Start a swapped sequence with the cached blocks of `table` and copies of its further host blocks."""
        num_cached = len(table)
        self.pool.extend(table, sequence.num_computed_tokens)
        builder.swap_in += zip(table[num_cached:], sequence.host_blocks[num_cached:], strict=True)
        self._host.release(sequence.host_blocks)
        sequence.block_table = table
        sequence.num_published_blocks = num_cached

    def preempt(self, victim: Sequence, builder: StepPlanBuilder) -> None:
        """Take the blocks of a running sequence; its KV is swapped out or will be recomputed."""
        num_shared = self.pool.num_shared(victim.block_table)
        if self._preemption.should_swap(victim, num_shared, self.pool.block_size, self._host):
            victim.host_blocks = self._host.allocate(len(victim.block_table))
            builder.swap_out += zip(victim.block_table, victim.host_blocks, strict=True)
        else:
            victim.num_computed_tokens = 0
        self._release_blocks(victim)
        victim.num_preemptions += 1
        builder.preempted.append(victim)

    def publish(self, sequence: Sequence) -> None:
        """Add the blocks of a sequence that have become full to the prefix cache."""
        if sequence.cache_salt is not None:
            sequence.num_published_blocks = self.pool.publish(
                sequence.block_table,
                sequence.tokens,
                sequence.cache_salt,
                sequence.num_published_blocks,
                sequence.num_computed_tokens,
            )

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a finished sequence, in the cache and on the host."""
        self._release_blocks(sequence)
        self._host.release(sequence.host_blocks)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert the invariants that hold between steps."""
        running, waiting = list(running), list(waiting)
        self.pool.check_integrity([sequence.block_table for sequence in running])
        self._host.check_integrity([sequence.host_blocks for sequence in waiting])
        for sequence in running:
            assert 0 < sequence.num_computed_tokens < len(sequence.tokens)
            assert len(sequence.block_table) == self.pool.blocks_for(sequence.num_computed_tokens)
            assert not sequence.host_blocks
            if sequence.cache_salt is not None:
                assert sequence.num_published_blocks == sequence.num_computed_tokens // self.pool.block_size
        for sequence in waiting:
            assert sequence.is_waiting
            assert len(sequence.host_blocks) == self.pool.blocks_for(sequence.num_computed_tokens)

    def _num_cacheable(self, sequence: Sequence) -> int:
        """Return how many leading full blocks the sequence could take from the prefix cache."""
        if sequence.host_blocks:
            return sequence.num_computed_tokens // self.pool.block_size
        if sequence.wants_prompt_logprobs:  # they come only from computing the tokens
            return 0
        return (len(sequence.tokens) - 1) // self.pool.block_size

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.num_published_blocks = 0
