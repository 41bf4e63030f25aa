"""Decides which tokens the next step computes: decodes first, then the prompts.

DeepSpeed-FastGen (Holmes et al., 2024), section 3: the latency of a step depends on its number of tokens, and hardly on
how they are grouped into sequences. So decodes and prompt chunks draw on one budget. See docs/decisions/022.
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from dataclasses import replace

from fastgen.core.blocks.kv_cache_manager import KVCacheManager
from fastgen.core.blocks.preemption import choose_victim
from fastgen.core.blocks.prefix_cache import BlockKey
from fastgen.core.blocks.state_pool import StateSave
from fastgen.core.chunking import Allowance, Chunker, StepLoad, whole_tiles
from fastgen.core.request_queue import RequestQueue, by_rank
from fastgen.core.sequence import UNKNOWN, Sequence
from fastgen.core.step_plan import Chunk, StepPlan

# The backlog is counted up to this many full steps. A longer one makes no difference to the next step.
_LOOKAHEAD_STEPS = 64


class StepPlanner:
    """Plans one step. A chunk that is added gets its blocks and spends token budget at once.

    Each decode takes one token. If it needs a block and none is free, the lowest-ranked sequence is preempted, and no
    sequence is admitted in this step. Sequences that were swapped out as they decoded come next: they wait for tokens
    and blocks, but not for time.

    The chunker decides how many tokens the prompts get besides, and how much time. They are served by priority. Of what
    is left for a priority, its first prompt, by rank, gets half, and the shortest ones, mid-prefill or waiting, get the
    rest. If the first prompt waits and does not fit yet, no other is admitted. A prompt that overtakes waiting ones
    must fit whole in the free blocks.

    Args:
        running: sequences that hold blocks, by rank. Preempted ones are moved to `waiting`, admitted ones to `running`.
        waiting: those that hold none.
        in_flight: plans of the steps in flight.
        kv_cache: allocates the blocks.
        chunker: decides how many prompt tokens the step computes.
        max_sequences: most running sequences.
        token_budget: most tokens of the step.
    """

    def __init__(
        self,
        running: list[Sequence],
        waiting: RequestQueue,
        in_flight: abc.Collection[StepPlan],
        *,
        kv_cache: KVCacheManager,
        chunker: Chunker,
        max_sequences: int,
        token_budget: int,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._in_flight = in_flight
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._chunker = chunker
        self._max_sequences = max_sequences
        self._left = Allowance(token_budget)  # what may still be added to the step
        self._admits = True  # whether waiting sequences may be admitted
        self._continued: list[Sequence] = []  # decodes below `decodes_until`
        self._decodes: list[Chunk] = []  # the other ones
        self._prompts: dict[Sequence, int] = {}  # tokens of each in this step
        self._unfinished: list[Sequence] = []  # prompts that are mid-prefill before or after this step
        self._num_awaiting = 0  # running sequences that await a mask
        self._keys: set[BlockKey] = set()
        self._preempted: list[Sequence] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []

    def may_preempt(self) -> bool:
        """Return whether the step may need more blocks than are free."""
        free, block_size = self._kv_cache.num_free, self._pool.block_size
        if free > len(self._running):
            return False
        needed = sum(len(s.block_table) * block_size == s.num_computed_tokens for s in self._running)
        return needed > free

    def plan(self) -> StepPlan:
        """Decide the step and advance its sequences."""
        prefilling = self._add_decodes()
        self._unfinished = list(prefilling)
        self._readmit_decodes(prefilling)
        if self._left.tokens:
            self._add_prompts(prefilling)
        return self._build()

    def _add_decodes(self) -> list[Sequence]:
        """Add the running sequences with one pending token; return those with more, by rank.

        Left out are those beyond the token budget, those that wait for a mask, those without a block, and those whose
        last token a step in flight samples.
        """
        block_size = self._pool.block_size
        continued, prefilling = [], []
        # Reserve one block for the highest-ranked sequence if it is mid-prefill: its chunk is scheduled after the
        # decodes, and it must advance in every step.
        num_reserved = 0
        if self._running and self._running[0].num_pending_tokens > 1:
            first = self._running[0]
            if len(first.block_table) * block_size == first.num_computed_tokens:
                self._make_room(first, 0)
                num_reserved = 1
        for sequence in self._running[: self._left.tokens]:
            computed = sequence.num_computed_tokens
            if computed < sequence.decodes_until:  # almost always
                continued.append(sequence)
                continue
            if not sequence.block_table:  # preempted in this loop
                continue
            if sequence.num_pending_tokens > 1:
                prefilling.append(sequence)
                continue
            if computed + 1 >= sequence.max_length:  # a step in flight samples its last token
                continue
            if sequence.awaits_mask:
                self._num_awaiting += 1
                continue
            if len(sequence.block_table) * block_size == computed:
                # It might preempt itself, and nothing would run.
                if self._num_awaiting and self._kv_cache.num_free <= num_reserved:
                    continue
                if not self._make_room(sequence, num_reserved):
                    continue
            self._add_decode(sequence)
        self._continued = continued
        self._left = Allowance(self._left.tokens - self._num_decodes)
        return [sequence for sequence in prefilling if sequence.block_table]

    def _add_decode(self, sequence: Sequence) -> None:
        """Add the only pending token of a running sequence. There is a block for it."""
        self._kv_cache.extend(sequence, sequence.num_computed_tokens + 1)
        self._decodes.append(Chunk(sequence, sequence.num_computed_tokens, 1))
        held = len(sequence.block_table) * self._pool.block_size
        sequence.decodes_until = min(held, sequence.max_length - 1)

    def _make_room(self, sequence: Sequence, num_reserved: int) -> bool:
        """Preempt sequences until there is a block for `sequence` besides the reserved ones.

        Return False if `sequence` itself was preempted.
        """
        while self._kv_cache.num_free <= num_reserved:
            victim = choose_victim(self._running[self._running.index(sequence) :])
            self._running.remove(victim)
            self._swap_out += self._kv_cache.preempt(victim)
            self._preempted.append(victim)
            self._waiting.push(victim)
            self._admits = False
            if victim is sequence:
                return False
        return True

    def _readmit_decodes(self, prefilling: list[Sequence]) -> None:
        """Readmit the first waiting sequences as long as they were swapped out with one pending token.

        They are not bounded by time, and the prompts get what they leave: at least a token each. Those behind a waiting
        prompt must not overtake it before it has been tried, so they are left to `_share`.
        """
        while self._admits and self._waiting and self._left.tokens > len(prefilling):
            first = self._waiting.sequences[0]
            if not _is_swapped_decode(first):
                break
            self._admit(first, self._left)

    def _add_prompts(self, prefilling: list[Sequence]) -> None:
        """Fill the step with chunks of prompts; `prefilling` are those that run already, by rank."""
        backlog = self._backlog(prefilling)
        if not backlog:
            return
        continued_kv_tokens = sum([sequence.num_computed_tokens for sequence in self._continued])
        kv_tokens = continued_kv_tokens + sum([chunk.start for chunk in self._decodes])
        load = StepLoad(self._num_decodes, kv_tokens, backlog, self._num_awaiting)
        self._left = self._chunker.allowance(self._left.tokens, load)
        while self._left.tokens:
            candidates = [*prefilling[:1], *(self._waiting.sequences[:1] if self._admits else ())]
            if not candidates:
                break
            first = min(candidates, key=by_rank)
            peers = [sequence for sequence in prefilling if sequence.priority == first.priority]
            prefilling = prefilling[len(peers) :]
            self._share(first, peers)

    def _backlog(self, prefilling: list[Sequence]) -> int:
        """Return the prompt tokens that could be computed now, counted up to the lookahead."""
        enough = self._left.tokens * _LOOKAHEAD_STEPS
        backlog = sum(sequence.num_pending_tokens for sequence in prefilling)
        if self._admits:
            for sequence in self._waiting.sequences[: self._max_sequences - len(self._running)]:
                if backlog >= enough:
                    break
                backlog += sequence.num_pending_tokens
        return min(backlog, enough)

    def _share(self, first: Sequence, peers: list[Sequence]) -> None:
        """Share the rest of the step among the prompts of one priority.

        Args:
            first: the highest-ranked one, mid-prefill or waiting.
            peers: those that are mid-prefill, by rank.
        """
        share = self._left.half
        if not first.is_waiting:
            self._add_chunk(first, share)
        elif self._admit(first, share):
            peers = [first, *peers] if first in self._prompts else peers
        elif peers:
            self._add_chunk(peers[0], share)
        # Over a long context the least tokens may take more than half of the time. The others get their half then, too.
        self._left = replace(self._left, seconds=max(self._left.seconds, share.seconds))
        peers.sort(key=self._num_left)
        while self._left.tokens:
            shortest = self._waiting.shortest(first.priority) if self._admits else None
            if peers and (shortest is None or self._num_left(peers[0]) <= shortest.num_pending_tokens):
                self._add_chunk(peers.pop(0), self._left)
            elif shortest is not None:
                self._admit(shortest, self._left)
            else:
                break

    def _admit(self, sequence: Sequence, most: Allowance) -> bool:
        """Start a waiting sequence with the blocks it has in the prefix cache or the host buffer.

        One that was swapped out as it decoded does not wait for time.

        Args:
            sequence: the first waiting one, or one that overtakes it.
            most: what it may take of this step.

        Returns:
            False if it must wait: for token budget, for time, for another sequence to end, for blocks, for a slot of
            recurrent states, or for a block that another sequence computes in this step or in one in flight. That block
            is cached once the step is settled, so sharing it costs the sequence about one step per block saved. No
            other is admitted in this step then.
        """
        self._admits = False
        if not self._left.tokens or len(self._running) >= self._max_sequences or not self._kv_cache.num_free:
            return False
        table = self._kv_cache.match_prefix(sequence)
        start = max(len(table) * self._pool.block_size, sequence.num_computed_tokens)
        decodes = _is_swapped_decode(sequence)
        fits = self._fits(sequence, table) and self._kv_cache.has_slots(sequence, table)
        fits = fits and (decodes or self._tokens_in_time(sequence, start, most) > 0)
        if not fits or self._is_next_computed(sequence, table):
            self._kv_cache.release_match(sequence, table)
            return False
        self._admits = True
        self._waiting.remove(sequence)
        if sequence.host_blocks:
            self._swap_in += self._kv_cache.swap_in(sequence, table)
        else:
            self._kv_cache.allocate(sequence, table)
        insort(self._running, sequence, key=by_rank)
        if decodes:
            self._add_decode(sequence)
            self._left = self._left.without(start, 0, 1)
            return True
        scheduled = self._add_chunk(sequence, most)
        assert scheduled, "an admitted sequence has room for a token"
        if self._num_left(sequence):
            self._unfinished.append(sequence)
        return True

    def _fits(self, sequence: Sequence, table: list[int]) -> bool:
        """Return whether there are enough blocks to admit a sequence with the cached blocks of `table`.

        One is enough for a new sequence that is first in the queue. Others must fit whole, with one block of growth for
        each running sequence:
        - One that was preempted, because blocks were short. Readmitted on the first free block, it would recompute its
          prompt and lose it again to the next decode that needs a block.
        - One that overtakes. It must not take the blocks that mid-prefill prompts still need.
        """
        kv_cache = self._kv_cache
        overtakes = sequence is not self._waiting.sequences[0]
        if not overtakes and not sequence.num_preemptions:
            return kv_cache.num_free > 0
        return kv_cache.has_room(sequence, table, self._unfinished if overtakes else (), len(self._running))

    def _is_next_computed(self, sequence: Sequence, table: list[int]) -> bool:
        """Return whether another sequence computes the next uncached block, in this step or in one in flight.

        A swapped sequence has its blocks on the host: copying them back is no reason to wait.
        """
        if sequence.host_blocks:
            return False
        key = self._kv_cache.next_key(sequence, table)
        return key is not None and (key in self._keys or any(key in plan.keys for plan in self._in_flight))

    def _add_chunk(self, sequence: Sequence, most: Allowance) -> bool:
        """Add at most `most` of a prompt, as blocks allow.

        If that is all that is left of the step, and the time bounds it, the step is then full: it fills whole tiles of
        rows. Return False if no token was added: others may have a shorter context.
        """
        start, before = sequence.num_computed_tokens, self._prompts.get(sequence, 0)
        capacity = self._kv_cache.token_capacity(sequence, start + before)
        added = min(self._num_left(sequence), most.tokens, capacity)
        in_time = self._tokens_in_time(sequence, start, most)
        is_full = 0 < in_time < added and most is self._left
        if is_full:
            # Products compute the rows of a step in tiles; attention computes those of a chunk.
            others = self._num_decodes + sum(self._prompts.values()) - before
            rows = 0 if most.is_mostly_attention(start) else others
            tokens = before + in_time
            in_time = max(0, whole_tiles(rows, tokens, min(most.excess, tokens // 4)) - before)
        added = min(added, in_time)
        self._left = Allowance(0) if is_full else self._left.without(start, before, max(0, added))
        if added < 1:
            return False
        size = self._prompts[sequence] = before + added
        self._kv_cache.extend(sequence, start + size)
        block = start // self._pool.block_size
        if sequence.cache_salt is not None and start + size >= (block + 1) * self._pool.block_size:
            self._keys.add(self._pool.key(sequence.block_table, sequence.tokens, sequence.cache_salt, block))
        return True

    def _tokens_in_time(self, sequence: Sequence, start: int, most: Allowance) -> int:
        """Return by how many tokens a chunk may grow in the time.

        The first chunk of the step may grow to `Allowance.least_tokens`, whatever the time.
        """
        before = self._prompts.get(sequence, 0)
        in_time = most.tokens_in_time(start, before)
        is_first = self._prompts.keys() <= {sequence}
        return max(in_time, most.least_tokens(start) - before) if is_first else in_time

    def _num_left(self, sequence: Sequence) -> int:
        """Return the pending tokens of a sequence that are not in this step."""
        return sequence.num_pending_tokens - self._prompts.get(sequence, 0)

    @property
    def _num_decodes(self) -> int:
        return len(self._continued) + len(self._decodes)

    def _build(self) -> StepPlan:
        """Advance the sequences and return the plan, with chunks of one token first."""
        if self._num_decodes or self._prompts:
            self._chunker.observe(self._num_decodes, sum(self._prompts.values()))
        prompts = [Chunk(sequence, sequence.num_computed_tokens, size) for sequence, size in self._prompts.items()]
        sources, saves = self._plan_states((*self._decodes, *prompts)) if self._kv_cache.has_states else ({}, [])
        starts = []
        for sequence in self._continued:  # the same as `advance(1)`, which takes three times as long
            start = sequence.num_computed_tokens
            starts.append(start)
            sequence.num_computed_tokens = start + 1
            sequence.num_in_flight += 1
            sequence.tokens.append(UNKNOWN)
        for chunk in (*self._decodes, *prompts):
            chunk.sequence.advance(chunk.num_tokens)
        prompts.sort(key=lambda chunk: chunk.num_tokens > 1)
        return StepPlan(
            (*self._decodes, *prompts),
            tuple(self._preempted),
            tuple(self._swap_out),
            tuple(self._swap_in),
            continued=(self._continued, starts),
            keys=self._keys,
            state_sources=sources,
            state_saves=saves,
        )

    def _plan_states(self, chunks: abc.Iterable[Chunk]) -> tuple[dict[Sequence, int], list[StateSave]]:
        """Return `StepPlan.state_sources` and `StepPlan.state_saves`, before the sequences advance."""
        kv_cache, sources = self._kv_cache, dict[Sequence, int]()
        saves: list[StateSave] = []
        for sequence in self._continued:
            if sequence.spare_slot is not None:
                saves += kv_cache.save_states(sequence, sequence.num_computed_tokens + 1, samples=True)
        for chunk in chunks:
            saves += kv_cache.save_states(chunk.sequence, chunk.start + chunk.num_tokens, samples=chunk.samples)
            if (source := kv_cache.start_state(chunk.sequence)) is not None:
                sources[chunk.sequence] = source
        self._pool.states.unpin()
        return sources, saves


def _is_swapped_decode(sequence: Sequence) -> bool:
    """Return whether a waiting sequence was swapped out with one pending token."""
    return bool(sequence.host_blocks) and sequence.num_pending_tokens == 1
