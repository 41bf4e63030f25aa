"""Where a sequence's KV is: in blocks of the cache, in blocks of the host buffer, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable

from fastgen.core.block_pool import BlockPool
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlanBuilder


class KVCacheManager:
    """Moves sequences in and out of the cache."""

    def __init__(self, pool: BlockPool, host: HostBuffer, preemption: Preemption) -> None:
        self.pool = pool
        self._host = host
        self._preemption = preemption

    def cached(self, sequence: Sequence) -> list[int]:
        """A table of what the prefix cache has for a waiting sequence; the blocks are held now.

        At least one token is left to compute, so that there are logits to sample from.
        """
        if sequence.cache_salt is None:
            return []
        return self.pool.match(sequence.tokens, sequence.cache_salt, self._num_readable(sequence))

    def is_computed(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Is the block that follows `table`, and that the cache lacks, computed in this pass for somebody else?"""
        if sequence.cache_salt is None or len(table) >= self._num_readable(sequence):
            return False
        return builder.computes(self.pool.key(table, sequence.tokens, sequence.cache_salt, len(table)))

    def allocate(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> None:
        """Gives a waiting sequence `table`, and copies of what it has in the host buffer beyond that."""
        num_cached = len(table)
        if sequence.host_blocks:
            self.pool.extend(table, sequence.num_computed_tokens)
            builder.swap_in += zip(table[num_cached:], sequence.host_blocks[num_cached:], strict=True)
            self._host.release(sequence.host_blocks)
        else:
            sequence.num_computed_tokens = num_cached * self.pool.block_size
        if sequence.first_scheduled is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.block_table = table
        sequence.num_published_blocks = num_cached

    def preempt(self, victim: Sequence, builder: StepPlanBuilder) -> None:
        """Takes the blocks of a running sequence: into the host buffer, or its KV is to be computed again."""
        num_shared = self.pool.num_shared(victim.block_table)
        if self._preemption.swaps(victim, num_shared, self.pool.block_size, self._host):
            victim.host_blocks = self._host.take(len(victim.block_table))
            builder.swap_out += zip(victim.block_table, victim.host_blocks, strict=True)
        self._release(victim)
        if not victim.host_blocks:
            victim.forget()
        victim.num_preemptions += 1
        builder.preempted.append(victim)

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the blocks of a sequence that have become full."""
        if sequence.cache_salt is not None:
            sequence.num_published_blocks = self.pool.publish(
                sequence.block_table,
                sequence.tokens,
                sequence.cache_salt,
                sequence.num_published_blocks,
                sequence.num_computed_tokens,
            )

    def free(self, sequence: Sequence) -> None:
        """Frees all that a sequence holds: it has ended."""
        self._release(sequence)
        self._host.release(sequence.host_blocks)

    def check_integrity(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Asserts what must hold between passes."""
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

    def _num_readable(self, sequence: Sequence) -> int:
        """Leading full blocks that the sequence could take from the prefix cache instead of computing them."""
        if sequence.host_blocks:
            return sequence.num_computed_tokens // self.pool.block_size
        if sequence.wants_prompt_logprobs:  # only computed tokens have any
            return 0
        return (len(sequence.tokens) - 1) // self.pool.block_size

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.num_published_blocks = 0
