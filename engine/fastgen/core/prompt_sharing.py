"""Shares the token budget that decodes leave among prompts, and admits waiting ones. See docs/decisions/022."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from fastgen.core.blocks.kv_cache_manager import KVCacheManager
from fastgen.core.blocks.prefix_cache import Key
from fastgen.core.chunking import Chunker, StepLoad
from fastgen.core.request_queue import RequestQueue, by_rank
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlan, StepPlanBuilder

# The backlog is counted up to this many full steps. A longer one makes no difference to the next step.
_LOOKAHEAD_STEPS = 64


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """The scheduler's rules for prompts.

    Decodes come first, then prompts by priority. Of the tokens left for a priority, its first prompt, by rank, gets
    half, and the shortest ones, mid-prefill or waiting, get the rest. If the first prompt waits and does not fit yet,
    no other is admitted. Another prompt that overtakes waiting ones must fit whole.

    Attributes:
        running, waiting, in_flight, kv_cache, chunker: of the scheduler, which changes them too.
        max_sequences: most running sequences.
    """

    running: list[Sequence]
    waiting: RequestQueue
    in_flight: deque[tuple[StepPlan, set[Key]]]
    kv_cache: KVCacheManager
    chunker: Chunker
    max_sequences: int

    def schedule(self, builder: StepPlanBuilder, prefilling: list[Sequence]) -> None:
        """Fill the step with chunks of prompts, by priority; `prefilling` are those that run already, by rank."""
        if not builder.tokens_left:
            return
        builder.admits = not builder.preempted
        backlog = self._backlog(builder, prefilling)
        if not backlog:
            return
        load = StepLoad(builder.num_decodes, builder.decode_kv_tokens, backlog)
        builder.tokens_left = min(builder.tokens_left, self.chunker.prompt_tokens(builder.tokens_left, load))
        builder.unfinished = list(prefilling)
        while builder.tokens_left:
            candidates = [*prefilling[:1], *(self.waiting.sequences[:1] if builder.admits else ())]
            if not candidates:
                break
            first = min(candidates, key=by_rank)
            peers = [sequence for sequence in prefilling if sequence.priority == first.priority]
            prefilling = prefilling[len(peers) :]
            self._share(first, peers, builder)

    def _backlog(self, builder: StepPlanBuilder, prefilling: list[Sequence]) -> int:
        """Return the prompt tokens that could be computed now, counted up to the lookahead."""
        backlog = sum(sequence.num_pending_tokens for sequence in prefilling)
        if builder.admits:
            enough = builder.tokens_left * _LOOKAHEAD_STEPS
            for sequence in self.waiting.sequences[: self.max_sequences - len(self.running)]:
                if backlog >= enough:
                    break
                backlog += sequence.num_pending_tokens
        return backlog

    def _share(self, first: Sequence, peers: list[Sequence], builder: StepPlanBuilder) -> None:
        """Share the rest of the step among the prompts of one priority.

        Args:
            first: the highest-ranked one, mid-prefill or waiting.
            peers: those that are mid-prefill, by rank.
            builder: the step.
        """
        share = -(-builder.tokens_left // 2)
        if not first.is_waiting:
            builder.add_prompt(first, share)
        elif self._admit(first, builder, share):
            peers = [first, *peers]
        elif peers:
            builder.add_prompt(peers[0], share)
        peers.sort(key=builder.num_left)
        while builder.tokens_left:
            shortest = self.waiting.shortest(first.priority) if builder.admits else None
            if peers and (shortest is None or builder.num_left(peers[0]) <= shortest.num_pending_tokens):
                builder.add_prompt(peers.pop(0), builder.tokens_left)
            elif shortest is not None:
                self._admit(shortest, builder, builder.tokens_left)
            else:
                break

    def _admit(self, sequence: Sequence, builder: StepPlanBuilder, most: int) -> bool:
        """Start a waiting sequence with the blocks it has in the prefix cache or the host buffer.

        Args:
            sequence: the first waiting one, or one that overtakes it.
            builder: the step. If the sequence must wait, it admits no others.
            most: tokens to compute in this step.

        Returns:
            False if it must wait, and nothing has changed: for token budget, for another sequence to end, for blocks,
            or for a block that another sequence computes in this step. That block is cached in the next step, so
            sharing it delays the sequence by at most one step per block saved.
        """
        pool = self.kv_cache.pool
        builder.admits = False
        if not builder.tokens_left or len(self.running) >= self.max_sequences or not pool.num_free:
            return False
        table = self.kv_cache.match_prefix(sequence)
        if not self._fits(sequence, table, builder) or self._is_next_computed(sequence, table, builder):
            pool.release(table)
            return False
        builder.admits = True
        self.waiting.remove(sequence)
        if sequence.host_blocks:
            builder.swap_in += self.kv_cache.swap_in(sequence, table)
        else:
            self.kv_cache.allocate(sequence, table)
        insort(self.running, sequence, key=by_rank)
        scheduled = builder.add_prompt(sequence, most)
        assert scheduled, "an admitted sequence has room for a token"
        if builder.num_left(sequence):
            builder.unfinished.append(sequence)
        return True

    def _is_next_computed(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Return whether another sequence computes the next uncached block, in this step or in one in flight."""
        key = self.kv_cache.next_key(sequence, table)
        return key is not None and (key in builder.keys or any(key in keys for _, keys in self.in_flight))

    def _fits(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Return whether there are enough blocks to admit a sequence with the cached blocks of `table`.

        One is enough for a new sequence that is first in the queue. Others must fit whole, with one block of growth for
        each running sequence:
        - One that was preempted, because blocks were short. Readmitted on the first free block, it would recompute its
          prompt and lose it again to the next decode that needs a block.
        - One that overtakes. It must not take the blocks that mid-prefill prompts still need.
        """
        pool = self.kv_cache.pool
        overtakes = sequence is not self.waiting.sequences[0]
        if not overtakes and not sequence.num_preemptions:
            return pool.num_free > 0
        needed = pool.blocks_for(len(sequence.tokens)) - len(table) + len(self.running)
        if overtakes:
            needed += sum(pool.blocks_for(len(s.tokens)) - len(s.block_table) for s in builder.unfinished)
        return needed <= pool.num_free
