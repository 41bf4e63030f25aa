"""Dynamic SplitFuse: plans steps and records their results.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.2: long prompts are split over several steps, and short prompts are
fused with all running generations into one step, so that every step computes about the same number of tokens. What a
step computes is decided in `fastgen.core.step_planner`.
"""

from __future__ import annotations

from collections import Counter, abc, deque

from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.blocks.kv_cache_manager import KVCacheManager
from fastgen.core.blocks.preemption import Preemption
from fastgen.core.blocks.state_pool import StateSave
from fastgen.core.chunking import Chunker, StepLimit, Target, target_of
from fastgen.core.request import FinishReason
from fastgen.core.request_queue import Deadlines, RequestQueue
from fastgen.core.sequence import Sequence
from fastgen.core.stats import SchedulerStats
from fastgen.core.step_model import StepModel
from fastgen.core.step_plan import StepPlan
from fastgen.core.step_planner import StepPlanner
from fastgen.core.step_times import StepTimes
from fastgen.settings import EngineConfig


class Scheduler:
    """Owns all unfinished sequences and the block pool.

    Running sequences hold cache blocks; waiting ones hold none. Sequences are ranked by priority, then by arrival:
    - A decoding sequence that needs a block when none is free preempts the lowest-ranked one, possibly itself. So does
      the highest-ranked sequence while it is mid-prefill. No sequence is admitted in that step.
    - Prompts share the token budget that the decodes leave, see `StepPlanner`.

    So the highest-ranked running sequence advances in every step in which no higher-ranked one is admitted, unless it
    waits for the mask of its grammar. The first prompt is admitted at the latest when running sequences end, and then
    takes at most twice as many steps as it would alone. Within a priority the oldest ranks highest, so only sequences
    of higher priority can starve a sequence. See docs/decisions/022.

    A step may be scheduled while earlier ones run. Sequences advance when they are scheduled, and `settle` records the
    results. Blocks stay reserved while a step in flight reads or writes them. No sequence is preempted while a step
    is in flight, because the sequence's last token would be unknown.

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
        self.max_sequences = max_sequences
        self._limit = StepLimit(token_budget)
        self._end_tokens = end_tokens
        self._chunker = chunker or Chunker("greedy", Target())
        self._kv_cache = KVCacheManager(pool, host or HostBuffer(0), preemption or Preemption("recompute", StepModel()))
        self._running: list[Sequence] = []
        self._ended: list[Sequence] = []  # ended, but computed by a step in flight
        self._in_flight: deque[StepPlan] = deque()
        # Blocks that no sequence holds but steps in flight may still read, by the last of these steps.
        self._replaced: dict[StepPlan, list[int]] = {}
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

        `seconds_per_block` is the time to copy a block to or from `host`; 0 if unknown.
        """
        return cls(
            pool,
            token_budget=config.most_tokens,
            max_sequences=config.sequence_limit,
            end_tokens=end_tokens,
            chunker=Chunker(config.chunking, target_of(config.inter_token_target, times)),
            host=host,
            preemption=Preemption(config.preemption, times, seconds_per_block),
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
        """Whether any sequence is running or waiting. Held ones do not count."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. The whole pool must be large enough for its longest state."""
        self.hold(sequence)
        self.release(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Accept a new sequence that cannot be scheduled yet: its grammar is being compiled."""
        longest = sequence.num_prompt_tokens if sequence.pooling is not None else sequence.max_length
        window = self.pool.window
        assert self.pool.blocks_for(longest) <= self.pool.num_blocks, f"{sequence} can never fit"
        assert window is None or window.blocks_for(longest) <= window.num_blocks, f"{sequence} can never fit"
        assert sequence.num_computed_tokens == 0
        if not sequence.sampling.ignore_eos:
            sequence.stop_tokens |= self._end_tokens
        self._held[sequence.ordinal] = sequence
        self._deadlines.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Queue a held sequence. It is ranked by its arrival, not by its release."""
        self._waiting.push(self._held.pop(sequence.ordinal))

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a held, waiting or running sequence; its blocks are freed when no step in flight computes it."""
        self._end(sequence, reason)

    def end_overdue(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline has passed at `now` and return them."""
        overdue = self._deadlines.overdue(now)
        for sequence in overdue:
            self._end(sequence, FinishReason.DEADLINE)
        return overdue

    def schedule(self) -> StepPlan | None:
        """Plan the next step: running decodes first, then swapped ones, then mid-prefill and waiting prompts.

        Blocks are allocated for the tokens of this step only, never for what a request may need later.

        Returns:
            The plan. None if the results of the steps in flight are needed first: for blocks, or because no sequence
            has another token to compute. Also None if there is no work, or all of it waits for masks of grammars.
        """
        planner = StepPlanner(
            self._running,
            self._waiting,
            self._in_flight,
            kv_cache=self._kv_cache,
            chunker=self._chunker,
            max_sequences=self.max_sequences,
            token_budget=self._limit.tokens,
        )
        if self._in_flight and planner.may_preempt():
            return None
        plan = planner.plan()
        if not plan.sequences:
            held_back = any(sequence.awaits_mask for sequence in self._running)
            assert self._in_flight or not self.has_work or held_back, "there is work, but nothing was scheduled"
            assert not plan.preempted
            return None
        self._in_flight.append(plan)
        return plan

    def settle(self, plan: StepPlan, sampled: abc.Sequence[int]) -> list[Sequence | None]:
        """Record the results of a step.

        Args:
            plan: the oldest plan that is not settled.
            sampled: one token for each chunk that samples, in the order of the chunks.

        Returns:
            For each sampled token its sequence, or None if the token is discarded: the sequence had ended before, or
            lacked the mask of its grammar.
            Sequences that end with their token have a `finish_reason`, and so have those whose pooling is complete.
        """
        settled = self._in_flight.popleft()
        assert settled is plan, "steps are settled in the order in which they were scheduled"
        self._limit.record()
        tokens = _spread(sampled, plan.samples)
        grown: list[Sequence | None] = []
        any_ended = False
        block_size, snapshots = self.pool.block_size, plan.snapshots
        for sequence, computed, token in zip(plan.sequences, plan.ends, tokens, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None or (sequence.lacks_mask and token is not None):
                if token is not None:
                    grown.append(None)
                self._discard_sample(sequence)
                self._add_snapshots(sequence, snapshots)
                continue
            if snapshots or computed >= (sequence.num_published_blocks + 1) * block_size:
                self._publish(sequence, computed)
                self._add_snapshots(sequence, snapshots)
            if token is not None:
                grown.append(sequence)
                if sequence.settle(computed, token):
                    any_ended = True
                    self._retire(sequence)
            elif sequence.pooling is not None and sequence.settle_pooled(computed):
                any_ended = True
                self._retire(sequence)
        if any_ended:
            self._running = [sequence for sequence in self._running if sequence.finish_reason is None]
        self.pool.release(self._replaced.pop(plan, []))
        return grown

    def roll_back(self, plan: StepPlan) -> None:
        """Undo the newest step that is not settled and has no results: its tokens are scheduled again.

        Its sequences keep the KV that earlier steps computed. If the step was to copy a sequence's KV between cache and
        host, that KV is recomputed, because it is unknown whether it was copied. The caller waits for the device before
        it launches another step: this one may still read and write the blocks that are freed.
        """
        newest = self._in_flight.pop()
        assert newest is plan, "steps are rolled back newest first"
        self.pool.release(self._replaced.pop(plan, []))
        for save in plan.state_saves:
            if save.is_snapshot:
                self.pool.states.release(save.slot)
        copied = {block for block, _ in plan.swap_in}
        for sequence, start, sampled in zip(plan.sequences, plan.starts, plan.samples, strict=True):
            sequence.num_in_flight -= 1
            if sequence.finish_reason is not None:
                self._free_if_idle(sequence)
                continue
            sequence.roll_back(start, sampled=sampled)
            self._kv_cache.truncate(sequence)
            # A step that failed may have changed the recurrent states of some layers.
            has_lost_state = self._kv_cache.has_states and not sequence.num_in_flight
            if not sequence.block_table or has_lost_state or not copied.isdisjoint(sequence.block_table):
                self._running.remove(sequence)
                self._kv_cache.drop(sequence)
                self._waiting.push(sequence)
        for sequence in plan.preempted:
            if sequence.host_blocks:
                self._waiting.remove(sequence)
                self._kv_cache.drop(sequence)
                self._waiting.push(sequence)

    def reduce_steps(self, plan: StepPlan) -> Sequence | None:
        """Make the next steps smaller, because one with this plan ran out of memory.

        Call it after `roll_back`.

        Returns:
            The sequence that ended for lack of memory, if the step had only one token and the sequence had not ended
            before; otherwise None.
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
        held, window = self._held.values(), self.pool.window
        prefilling = [s for s in self._running if not s.decodes_until and not s.is_decoding]
        backlog = self._waiting.num_prompt_tokens + sum(sequence.num_pending_tokens for sequence in prefilling)
        oldest = min([self._waiting.oldest_arrival(), *(sequence.arrival for sequence in held)])
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) - self._waiting.num_swapped + len(held),
            num_swapped=self._waiting.num_swapped,
            kv_tokens=sum([sequence.num_computed_tokens for sequence in self._running]),
            kv_blocks_used=self.pool.num_blocks - self.pool.num_free,
            window_blocks_used=0 if window is None else window.num_blocks - window.num_free,
            backlog_prompt_tokens=backlog + sum(sequence.num_prompt_tokens for sequence in held),
            oldest_waiting_seconds=max(0.0, now - oldest),
        )

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps."""
        assert self._replaced.keys() <= set(self._in_flight)
        replaced = self._replaced.values()
        saves = [save for plan in self._in_flight for save in plan.state_saves]
        self._kv_cache.check_integrity(self._running, self._waiting.sequences, self._ended, replaced, saves)
        counts = Counter(sequence.ordinal for plan in self._in_flight for sequence in plan.sequences)
        for sequence in (*self._running, *self.waiting, *self._ended):
            assert sequence.num_in_flight == counts.pop(sequence.ordinal, 0), f"{sequence}: steps in flight miscounted"
        assert not counts, "a step in flight computes a sequence whose blocks are free"
        self._waiting.check_integrity()
        ranks = [sequence.rank for sequence in self._running]
        assert ranks == sorted(set(ranks)), "sequences are out of order"
        assert len(self._running) <= self.max_sequences
        unfinished = (*self._running, *self.waiting, *self._held.values())
        tracked = sum(sequence.deadline is not None for sequence in unfinished)
        assert len(self._deadlines) == tracked, "a finished sequence's deadline is still tracked"

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

    def _discard_sample(self, sequence: Sequence) -> None:
        """Settle a sequence that has ended, or is sampled again when its grammar's mask is known."""
        if sequence.finish_reason is not None:
            self._free_if_idle(sequence)
            return
        sequence.discard_sample()
        self._kv_cache.restore_state(sequence)
        # Others must not read the block of the token that is computed again, so it has not been published.
        if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * self.pool.block_size:
            self._publish(sequence, sequence.num_computed_tokens)
        self._kv_cache.truncate(sequence)
        if not sequence.block_table:
            self._running.remove(sequence)
            self._kv_cache.drop(sequence)
            self._waiting.push(sequence)

    def _add_snapshots(self, sequence: Sequence, snapshots: dict[Sequence, list[StateSave]]) -> None:
        """Keep the snapshots that a settled step took of a sequence, whose blocks it has published."""
        for save in snapshots.get(sequence, ()):
            self._kv_cache.add_snapshot(save)

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        """Add full blocks to the prefix cache, and free those that the window of their layers has left.

        Blocks that are replaced by equal cached ones are kept while steps in flight may read them.
        """
        replaced = self._kv_cache.publish(sequence, num_computed)
        self._kv_cache.leave_window(sequence, num_computed)
        if self._in_flight:
            self._replaced.setdefault(self._in_flight[-1], []).extend(replaced)
        else:
            self.pool.release(replaced)

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
