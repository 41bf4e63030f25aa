"""Dynamic SplitFuse: decides which tokens the next step computes.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.2: long prompts are split over several steps, and short prompts are
fused with all running generations into one step, so that every step computes about the same number of tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, abc, deque
from typing import Literal, cast

from fastgen.config import EngineConfig
from fastgen.core.block_pool import BlockPool
from fastgen.core.chunking import Chunker, NoTarget, StepLoad, target_of
from fastgen.core.deadlines import Deadlines
from fastgen.core.kv_cache_manager import KVCacheManager
from fastgen.core.preemption import HostBuffer, Preemption, choose_victim
from fastgen.core.prefix_cache import Key
from fastgen.core.request import FinishReason
from fastgen.core.request_queue import RequestQueue, by_rank
from fastgen.core.sequence import Sequence
from fastgen.core.stats import SchedulerStats
from fastgen.core.step_limit import StepLimit
from fastgen.core.step_model import StepModel, StepTimes
from fastgen.core.step_plan import Chunk, StepPlan, StepPlanBuilder

__all__ = ["Chunk", "Scheduler", "StepPlan"]

# The backlog is counted up to this many full steps. A longer one makes no difference to the next step.
_LOOKAHEAD_STEPS = 64


class Scheduler:
    """Owns all unfinished sequences and the block pool.

    Running sequences hold cache blocks; waiting ones hold none.

    Sequences are ranked by priority, then by arrival:
    - A sequence that needs a block when none is free preempts a lower-ranked one, or itself. No sequence is
      admitted in that step.
    - The prompts of a priority share what decodes and higher priorities leave of a step. The first of them, by rank,
      gets half. The rest goes to the shortest prompts, mid-prefill or waiting.
    - If the first prompt waits and does not fit yet, no other is admitted. Another prompt that overtakes waiting ones
      must fit whole.

    So the highest-ranked running sequence advances in every step in which no higher-ranked one is admitted. The first
    prompt is admitted when running ones end, at the latest, and then takes at most twice as many steps as without the
    others. Within a priority the oldest ranks highest, so a sequence can only be starved by sequences of higher
    priority. See docs/decisions/022.

    A step may be scheduled while earlier ones run. Sequences advance when they are scheduled, and `settle` records the
    results. Blocks stay reserved as long as a step in flight writes them. No sequence is preempted while a step is in
    flight: its last token would be unknown.

    A step that ran out of memory is rolled back instead of settled. The next ones have fewer tokens and sequences.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int,
        max_sequences: int,
        end_tokens: frozenset[int],
        chunker: Chunker | None = None,
        host: HostBuffer | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        assert 1 <= max_sequences <= token_budget, "each decoding sequence takes one token of every step"
        self.pool = pool
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self._limit = StepLimit(token_budget)
        self._end_tokens = end_tokens
        self._chunker = chunker or Chunker("greedy", NoTarget())
        self._kv_cache = KVCacheManager(pool, host or HostBuffer(0), preemption or Preemption("recompute", StepModel()))
        self._running: list[Sequence] = []
        self._ended: list[Sequence] = []  # ended, but computed by a step in flight
        self._in_flight: deque[tuple[StepPlan, set[Key]]] = deque()
        self._waiting = RequestQueue()
        self._held: dict[int, Sequence] = {}  # by ordinal
        self._deadlines = Deadlines()

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        pool: BlockPool,
        host: HostBuffer,
        *,
        seconds_per_block: float,
        end_tokens: frozenset[int],
        times: StepTimes,
    ) -> Scheduler:
        """Return the scheduler for the settings.

        Args:
            config: the settings.
            pool: blocks of the KV cache.
            host: blocks of the host buffer.
            seconds_per_block: time to copy a block between the two, one way; 0 if unknown.
            end_tokens: the model's end-of-sequence tokens.
            times: predicts step times.
        """
        return cls(
            pool,
            token_budget=config.most_tokens,
            max_sequences=config.sequence_limit,
            end_tokens=end_tokens,
            chunker=Chunker(
                cast(Literal["even", "greedy"], config.chunking), target_of(config.inter_token_target, times)
            ),
            host=host,
            preemption=Preemption(
                cast(Literal["auto", "recompute", "swap"], config.preemption), times, seconds_per_block
            ),
        )

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Sequences that hold cache blocks, by rank."""
        return self._running

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """New, preempted and swapped sequences, by rank."""
        return self._waiting.sequences

    @property
    def has_work(self) -> bool:
        """Return whether any unfinished sequence can be scheduled, now or later."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The whole pool must be large enough for its longest state."""
        self.hold(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Queue a held sequence, where its arrival ranks it."""
        self._waiting.push(self._held.pop(sequence.ordinal))

    def hold(self, sequence: Sequence) -> None:
        """Take a new sequence that cannot be scheduled yet: its grammar is being compiled."""
        longest = sequence.num_prompt_tokens if sequence.pooling is not None else sequence.max_length
        assert self.pool.blocks_for(longest) <= self.pool.num_blocks, f"{sequence} can never fit"
        assert sequence.num_computed_tokens == 0
        if not sequence.sampling.ignore_eos:
            sequence.stop_tokens |= self._end_tokens
        self._held[sequence.ordinal] = sequence
        self._deadlines.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, running or waiting, and free its blocks when no step in flight writes them."""
        self._end(sequence, FinishReason.ABORT)

    def end_overdue(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline has passed at `now` and return them."""
        overdue = self._deadlines.overdue(now)
        for sequence in overdue:
            self._end(sequence, FinishReason.DEADLINE)
        return overdue

    def schedule(self) -> StepPlan | None:
        """Plan the next step: all running decodes first, then mid-prefill and waiting prompts.

        Blocks are allocated for the tokens of this step only, never for what a request may need later.

        Returns:
            None if the results of the steps in flight are needed first: for blocks, or because no sequence has another
            token to compute.
        """
        if self._in_flight and self._may_preempt():
            return None
        builder = StepPlanBuilder(self.pool, self._limit.tokens)
        prefilling = self._schedule_decodes(builder)
        self._schedule_prompts(builder, prefilling)
        plan = builder.build()
        if not plan.sequences:
            assert self._in_flight or not self.has_work, "there is work, but nothing was scheduled"
            assert not plan.preempted
            return None
        self._chunker.observe(builder.num_decodes, builder.num_prompt_tokens)
        self._in_flight.append((plan, builder.keys))
        return plan

    def settle(self, plan: StepPlan, sampled: abc.Sequence[int]) -> list[Sequence | None]:
        """Record the results of a step.

        Args:
            plan: the oldest plan that is not settled.
            sampled: one token for each chunk that samples, in the order of the chunks.

        Returns:
            For each sampled token its sequence, or None if the sequence had ended before: the token is discarded.
            Sequences that end with their token have a `finish_reason`, and so have those whose pooling is complete.
        """
        settled, _ = self._in_flight.popleft()
        assert settled is plan, "steps are settled in the order in which they were scheduled"
        self._limit.record()
        tokens = _spread(sampled, plan.samples)
        grown: list[Sequence | None] = []
        ended = False
        block_size = self.pool.block_size
        for sequence, computed, token in zip(plan.sequences, plan.ends, tokens, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                if token is not None:
                    grown.append(None)
                self._free_if_idle(sequence)
                continue
            if computed >= (sequence.num_published_blocks + 1) * block_size:
                self._kv_cache.publish(sequence, computed)
            if token is not None:
                grown.append(sequence)
                if sequence.settle(computed, token):
                    ended = True
                    self._retire(sequence)
            elif sequence.pooling is not None and sequence.settle_pooled(computed):
                ended = True
                self._retire(sequence)
        if ended:
            self._running = [sequence for sequence in self._running if sequence.finish_reason is None]
        return grown

    def roll_back(self, plan: StepPlan) -> None:
        """Undo a step that has no results: its tokens are scheduled again.

        Its sequences keep the KV that earlier steps computed. If the step was to copy a sequence's KV between cache and
        host, that KV is recomputed: nobody knows whether it was copied. The device runs steps in order, so what this
        step may still write to freed blocks is overwritten by the steps that use them next.

        Args:
            plan: the newest plan that is not settled.
        """
        newest, _ = self._in_flight.pop()
        assert newest is plan, "steps are rolled back newest first"
        copied = {block for block, _ in plan.swap_in}
        for sequence, start, sampled in zip(plan.sequences, plan.starts, plan.samples, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                self._free_if_idle(sequence)
                continue
            sequence.roll_back(start, sampled=sampled)
            self._kv_cache.truncate(sequence)
            if not sequence.block_table or not copied.isdisjoint(sequence.block_table):
                self._running.remove(sequence)
                self._kv_cache.drop(sequence)
                self._waiting.push(sequence)
        for sequence in plan.preempted:
            if sequence.host_blocks:
                self._waiting.remove(sequence)
                self._kv_cache.drop(sequence)
                self._waiting.push(sequence)

    def reduce_steps(self, plan: StepPlan) -> Sequence | None:
        """Schedule smaller steps, because one with this plan ran out of memory. Call it after `roll_back`.

        Returns:
            The sequence that ended for lack of memory, if the step had only one token.
        """
        if plan.num_tokens > 1:
            self._limit.shrink(plan.num_tokens)
            return None
        sequence = plan.sequences[0]
        if sequence.finish_reason is not None:
            return None
        self._end(sequence, FinishReason.OUT_OF_MEMORY)
        return sequence

    def stats(self, now: float) -> SchedulerStats:
        """Return the current state; `now` is in seconds on the clock of the sequences' arrivals."""
        prefilling = [s for s in self._running if not s.decodes_until and not s.is_decoding]
        pending = sum(sequence.num_pending_tokens for sequence in prefilling)
        arrivals = [self._waiting.oldest_arrival(), *(held.arrival for held in self._held.values())]
        oldest = min((arrival for arrival in arrivals if arrival is not None), default=None)
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) - self._waiting.num_swapped + len(self._held),
            num_swapped=self._waiting.num_swapped,
            kv_tokens=sum([sequence.num_computed_tokens for sequence in self._running]),
            kv_blocks_used=self.pool.num_blocks - self.pool.num_free,
            backlog_prompt_tokens=self._waiting.num_prompt_tokens
            + pending
            + sum(held.num_prompt_tokens for held in self._held.values()),
            oldest_waiting_seconds=0.0 if oldest is None else max(0.0, now - oldest),
        )

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps."""
        self._kv_cache.check_integrity(self._running, self._waiting, self._ended)
        counts = Counter(sequence.ordinal for plan, _ in self._in_flight for sequence in plan.sequences)
        for sequence in (*self._running, *self._waiting, *self._ended):
            assert sequence.num_in_flight == counts.pop(sequence.ordinal, 0), f"{sequence}: steps in flight miscounted"
        assert not counts, "a step in flight computes a sequence whose blocks are free"
        self._waiting.check_integrity()
        ranks = [sequence.rank for sequence in self._running]
        assert ranks == sorted(set(ranks)), "sequences are out of order"
        assert len(self._running) <= self.max_sequences
        unfinished = (*self._running, *self._waiting, *self._held.values())
        tracked = sum(sequence.deadline is not None for sequence in unfinished)
        assert len(self._deadlines) == tracked, "a finished sequence's deadline is still tracked"

    def _schedule_decodes(self, builder: StepPlanBuilder) -> list[Sequence]:
        """Schedule all sequences with one pending token; return the other running ones by rank."""
        pool, block_size = self.pool, self.pool.block_size
        decoding, prefilling = [], []
        # Reserve one block for the highest-ranked sequence if it is mid-prefill: its chunk is scheduled after the
        # decodes, and it must advance in every step.
        num_reserved = 0
        if self._running and self._running[0].num_pending_tokens > 1:
            first = self._running[0]
            if len(first.block_table) * block_size == first.num_computed_tokens:
                self._make_room(first, builder, 0)
                num_reserved = 1
        for sequence in self._running[: self._limit.tokens]:
            computed = sequence.num_computed_tokens
            if computed < sequence.decodes_until:  # almost always
                decoding.append(sequence)
                continue
            if not sequence.block_table:  # preempted in this loop
                continue
            if sequence.num_pending_tokens > 1:
                prefilling.append(sequence)
                continue
            if computed + 1 >= sequence.max_length:  # a step in flight samples its last token
                continue
            if len(sequence.block_table) * block_size == computed:
                if not self._make_room(sequence, builder, num_reserved):
                    continue
                pool.extend(sequence.block_table, computed + 1)
            builder.add_decode(sequence)
            sequence.decodes_until = min(len(sequence.block_table) * block_size, sequence.max_length - 1)
        builder.add_continued(decoding)
        return [sequence for sequence in prefilling if sequence.block_table]

    def _schedule_prompts(self, builder: StepPlanBuilder, prefilling: list[Sequence]) -> None:
        """Fill the rest of the step with chunks of mid-prefill and waiting prompts, by priority."""
        if not builder.tokens_left:
            return
        admits = not builder.preempted
        backlog = self._backlog(prefilling, admits, builder.tokens_left)
        if not backlog:
            return
        load = StepLoad(builder.num_decodes, builder.decode_kv_tokens, backlog)
        builder.tokens_left = min(builder.tokens_left, self._chunker.prompt_tokens(builder.tokens_left, load))
        builder.unfinished = list(prefilling)
        while builder.tokens_left and (first := self._first_prompt(prefilling, admits)) is not None:
            peers = [sequence for sequence in prefilling if sequence.priority == first.priority]
            prefilling = prefilling[len(peers) :]
            admits = self._share_step(first, peers, builder, admits)

    def _first_prompt(self, prefilling: list[Sequence], admits: bool) -> Sequence | None:
        """Return the highest-ranked prompt that could be scheduled."""
        head = self._waiting.head if admits else None
        return min([*prefilling[:1], *([] if head is None else [head])], key=by_rank, default=None)

    def _share_step(self, first: Sequence, peers: list[Sequence], builder: StepPlanBuilder, admits: bool) -> bool:
        """Share the rest of the step among the prompts of one priority.

        Args:
            first: the highest-ranked one, mid-prefill or waiting.
            peers: those that are mid-prefill, by rank.
            builder: the step.
            admits: whether waiting ones may be admitted.

        Returns:
            Whether sequences of lower priorities may be admitted.
        """
        share = -(-builder.tokens_left // 2)
        if first.is_waiting:
            admits = self._admit(first, builder, share)
            if admits:
                peers = [first, *peers]
            elif peers:
                builder.add_prompt(peers[0], share)
        else:
            builder.add_prompt(first, share)
        peers.sort(key=builder.num_left)
        while builder.tokens_left:
            shortest = self._waiting.shortest if admits else None
            if shortest is not None and shortest.priority != first.priority:
                shortest = None
            if peers and (shortest is None or builder.num_left(peers[0]) <= shortest.num_pending_tokens):
                builder.add_prompt(peers.pop(0), builder.tokens_left)
            elif shortest is not None:
                admits = self._admit(shortest, builder, builder.tokens_left)
            else:
                break
        return admits

    def _backlog(self, prefilling: list[Sequence], admits: bool, room: int) -> int:
        """Return the prompt tokens that could be computed now, counted up to the lookahead."""
        backlog = sum(sequence.num_pending_tokens for sequence in prefilling)
        if admits:
            enough = room * _LOOKAHEAD_STEPS
            for sequence in self._waiting.sequences[: self.max_sequences - len(self._running)]:
                if backlog >= enough:
                    break
                backlog += sequence.num_pending_tokens
        return backlog

    def _admit(self, sequence: Sequence, builder: StepPlanBuilder, most: int) -> bool:
        """Start a waiting sequence with the blocks it has in the prefix cache or the host buffer.

        Args:
            sequence: the first waiting one, or one that overtakes it.
            builder: the step.
            most: tokens to compute in this step.

        Returns:
            False if it must wait, and nothing has changed: for token budget, for another sequence to end, for blocks,
            or for a block that another sequence computes in this step. That block is cached in the next step, so
            sharing it delays the sequence by at most one step per block saved.
        """
        if not builder.tokens_left or len(self._running) >= self.max_sequences or not self.pool.num_free:
            return False
        table = self._kv_cache.match_prefix(sequence)
        if not self._fits(sequence, table, builder) or self._is_next_computed(sequence, table, builder):
            self.pool.release(table)
            return False
        self._waiting.remove(sequence)
        if sequence.host_blocks:
            self._kv_cache.swap_in(sequence, table, builder)
        else:
            self._kv_cache.allocate(sequence, table)
        insort(self._running, sequence, key=by_rank)
        scheduled = builder.add_prompt(sequence, most)
        assert scheduled, "an admitted sequence has room for a token"
        if builder.num_left(sequence):
            builder.unfinished.append(sequence)
        return True

    def _is_next_computed(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Return whether another sequence computes the next uncached block, in this step or in one in flight."""
        key = self._kv_cache.next_key(sequence, table)
        return key is not None and (key in builder.keys or any(key in keys for _, keys in self._in_flight))

    def _fits(self, sequence: Sequence, table: list[int], builder: StepPlanBuilder) -> bool:
        """Return whether there are enough blocks to admit a sequence with the cached blocks of `table`.

        One is enough for a new sequence whose turn it is. Others must fit whole, with one block of growth for each
        running sequence:
        - One that was preempted, because blocks were short. Readmitted on the first free block, it would recompute its
          prompt and lose it again to the next decode that needs a block.
        - One that overtakes. It must not take the blocks that mid-prefill prompts still need.
        """
        overtakes = sequence is not self._waiting.head
        if not overtakes and not sequence.num_preemptions:
            return self.pool.num_free > 0
        needed = self.pool.blocks_for(len(sequence.tokens)) - len(table) + len(self._running)
        if overtakes:
            needed += sum(self.pool.blocks_for(len(s.tokens)) - len(s.block_table) for s in builder.unfinished)
        return needed <= self.pool.num_free

    def _may_preempt(self) -> bool:
        """Return whether the next step may need more blocks than there are."""
        free, block_size = self.pool.num_free, self.pool.block_size
        if free > len(self._running):
            return False
        needed = sum(len(s.block_table) * block_size == s.num_computed_tokens for s in self._running)
        return needed > free

    def _make_room(self, sequence: Sequence, builder: StepPlanBuilder, num_reserved: int) -> bool:
        """Preempt sequences until there is a block for `sequence` besides the reserved ones.

        Return False if `sequence` itself was preempted.
        """
        while self.pool.num_free <= num_reserved:
            victim = choose_victim(self._running[self._running.index(sequence) :])
            self._running.remove(victim)
            self._kv_cache.preempt(victim, builder)
            self._waiting.push(victim)
            if victim is sequence:
                return False
        return True

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.ordinal in self._held:
            del self._held[sequence.ordinal]
        elif sequence.is_waiting:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.finish_reason = reason
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Free the blocks of an ended sequence, or leave that to `settle` if a step in flight computes it."""
        self._deadlines.discard(sequence)
        if sequence.num_in_flight:
            self._ended.append(sequence)
        else:
            self._kv_cache.free(sequence)

    def _free_if_idle(self, ended: Sequence) -> None:
        """Free the blocks of a sequence that ended while steps in flight computed it, after the last of them."""
        if not ended.num_in_flight:
            self._ended.remove(ended)
            self._kv_cache.free(ended)


def _spread(sampled: abc.Sequence[int], samples: abc.Sequence[bool]) -> abc.Sequence[int | None]:
    """Return for each chunk its sampled token, or None if it does not sample."""
    if len(sampled) == len(samples):
        return sampled
    tokens = iter(sampled)
    spread = [next(tokens) if chunk_samples else None for chunk_samples in samples]
    assert next(tokens, None) is None, "more tokens were sampled than chunks sample"
    return spread
