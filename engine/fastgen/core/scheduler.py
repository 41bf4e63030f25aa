"""Dynamic SplitFuse: which tokens go into the next forward pass.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.2: long prompts are split over several passes, and short prompts and
all running generations are fused into the same pass, so that every pass carries about the same number of tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import abc

from fastgen.core.block_pool import BlockPool
from fastgen.core.chunking import Chunker, NoTarget, StepLoad
from fastgen.core.deadlines import Deadlines
from fastgen.core.kv_cache_manager import KVCacheManager
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.request import FinishReason
from fastgen.core.request_queue import RequestQueue
from fastgen.core.sequence import Rank, Sequence
from fastgen.core.stats import SchedulerStats
from fastgen.core.step_model import StepModel
from fastgen.core.step_plan import Chunk, StepPlan, StepPlanBuilder

__all__ = ["Chunk", "Scheduler", "StepPlan"]

# Backlogs beyond this many full passes shape a pass all alike: nobody needs to know how long they are.
_PASSES_LOOKED_AHEAD = 64


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Scheduler:
    """Owns the sequences alive and the block pool. Running sequences hold blocks of the cache; waiting ones hold none.

    Sequences are ranked by priority and then by arrival, and the better goes first everywhere:
    - the worst running sequence makes room where a better one needs a block, and no sequence is admitted in that pass;
    - waiting sequences are admitted best first, and nobody overtakes the best, even if it does not fit yet.

    So the best running sequence gets on in every pass, unless better ones were admitted in it; and the best waiting one
    waits for running ones to end at most, since none is put before it. Of each priority the oldest is the best: nobody
    starves but by others of better priority.
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
        assert 1 <= max_sequences <= token_budget, "each running sequence takes a token of every pass"
        self.pool = pool
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self._end_tokens = end_tokens
        self._chunker = chunker or Chunker("greedy", NoTarget())
        self._kv_cache = KVCacheManager(pool, host or HostBuffer(0), preemption or Preemption("recompute", StepModel()))
        self._running: list[Sequence] = []
        self._waiting = RequestQueue()
        self._deadlines = Deadlines()

    @property
    def running(self) -> abc.Sequence[Sequence]:
        """Sequences that hold blocks of the cache, best first."""
        return self._running

    @property
    def waiting(self) -> abc.Sequence[Sequence]:
        """Sequences that hold none, best first: new ones, and preempted ones, swapped out or not."""
        return self._waiting.line

    @property
    def has_work(self) -> bool:
        """Is any sequence alive?"""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. All it will ever need must fit in the pool when it is alone."""
        longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        assert self.pool.blocks_for(longest) <= self.pool.num_blocks, f"{sequence} can never fit"
        assert sequence.num_computed_tokens == 0
        self._waiting.push(sequence)
        self._deadlines.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is and frees all that it holds."""
        self._end(sequence, FinishReason.ABORT)

    def end_overdue(self, now: float) -> list[Sequence]:
        """Ends the sequences whose deadline has come by `now`, wherever they are, and returns them."""
        overdue = self._deadlines.overdue(now)
        for sequence in overdue:
            self._end(sequence, FinishReason.DEADLINE)
        return overdue

    def schedule(self) -> StepPlan:
        """Fills the next pass: every running decode first, then prompts, half-prefilled and waiting ones by rank.

        Blocks are taken for what the pass computes, never for what a request may need one day.
        """
        builder = StepPlanBuilder(self.pool, self.token_budget)
        half_prefilled = self._schedule_decodes(builder)
        self._schedule_prompts(builder, half_prefilled)
        self._chunker.note(len(builder.decodes), builder.num_prompt_tokens)
        plan = builder.finish()
        assert plan.chunks or not self.has_work, "work is there and nothing was scheduled"
        return plan

    def complete(self, plan: StepPlan, sampled: abc.Sequence[int]) -> list[Sequence]:
        """Takes note of a finished pass.

        Args:
            plan: the pass that `schedule` returned last.
            sampled: one token for each chunk that samples, in the order of the chunks.

        Returns:
            The sequences that got a token, in the order of the chunks; those that ended have a `finish_reason` and
            hold no blocks any more.
        """
        tokens = iter(sampled)
        grown, ended = [], False
        block_size, end_tokens = self.pool.block_size, self._end_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.advance(chunk.num_tokens)
            if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * block_size:
                self._kv_cache.publish(sequence)
            if chunk.samples:
                sequence.append(next(tokens), end_tokens)
                grown.append(sequence)
                ended |= sequence.finish_reason is not None
        assert next(tokens, None) is None, "more tokens were sampled than chunks sample"
        if ended:
            for sequence in grown:
                if sequence.finish_reason is not None:
                    self._kv_cache.free(sequence)
                    self._deadlines.discard(sequence)
            self._running = [sequence for sequence in self._running if sequence.finish_reason is None]
        return grown

    def stats(self, now: float) -> SchedulerStats:
        """What the scheduler holds at this moment; `now` is on the clock that sequences' arrivals are on."""
        kv_tokens, pending = 0, self._waiting.num_prompt_tokens
        for sequence in self._running:
            kv_tokens += sequence.num_computed_tokens
            if not sequence.is_decoding:
                pending += sequence.num_pending_tokens
        oldest = self._waiting.oldest_arrival()
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) - self._waiting.num_swapped,
            num_swapped=self._waiting.num_swapped,
            kv_tokens=kv_tokens,
            kv_blocks_used=self.pool.num_blocks - self.pool.num_free,
            backlog_prompt_tokens=pending,
            oldest_waiting_seconds=0.0 if oldest is None else max(0.0, now - oldest),
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between passes."""
        self._kv_cache.check_integrity(self._running, self._waiting)
        for line in (self._running, self._waiting.line):
            ranks = [sequence.rank for sequence in line]
            assert ranks == sorted(set(ranks)), "sequences are out of order"
        assert len(self._running) <= self.max_sequences
        watched = sum(s.deadline is not None for line in (self._running, self._waiting) for s in line)
        assert len(self._deadlines) == watched, "a deadline is watched for nobody"

    def _schedule_decodes(self, builder: StepPlanBuilder) -> list[Sequence]:
        """A token for every running sequence that has one pending; returns the half-prefilled ones, best first."""
        pool, block_size = self.pool, self.pool.block_size
        chunks, half_prefilled = [], []
        # The best sequence must get on. Is it half-prefilled, a block is held back for it, as its turn comes last.
        held_back = 0
        if self._running and self._running[0].num_pending_tokens > 1:
            best = self._running[0]
            if len(best.block_table) * block_size == best.num_computed_tokens:
                self._make_room(best, builder, 0)
                held_back = 1
        for sequence in self._running.copy():
            if not sequence.block_table:  # it made room for a better one
                continue
            computed = sequence.num_computed_tokens
            if len(sequence.tokens) - computed > 1:
                half_prefilled.append(sequence)
                continue
            if len(sequence.block_table) * block_size == computed:
                if not self._make_room(sequence, builder, held_back):
                    continue
                pool.extend(sequence.block_table, computed + 1)
            chunks.append(Chunk(sequence, computed, 1))
        builder.add_decodes(chunks)
        return [sequence for sequence in half_prefilled if sequence.block_table]

    def _schedule_prompts(self, builder: StepPlanBuilder, half_prefilled: list[Sequence]) -> None:
        """More of the prompts that are half in the cache and first chunks of waiting ones, the better ones first.

        A waiting sequence that cannot come in yet is not overtaken by other waiting ones.
        """
        if not builder.budget.left:
            return
        admits = not builder.preempted
        backlog = self._backlog(half_prefilled, admits, builder.budget.left)
        if not backlog:
            return
        load = StepLoad(len(builder.decodes), sum([chunk.start for chunk in builder.decodes]), backlog)
        builder.budget.bound(self._chunker.prompt_tokens(builder.budget.left, load))
        for sequence in half_prefilled:
            while admits and (first := self._waiting.first) is not None and first.rank < sequence.rank:
                admits = self._admit(first, builder)
            builder.add_prompt(sequence)
        while admits and (first := self._waiting.first) is not None:
            admits = self._admit(first, builder)

    def _backlog(self, half_prefilled: list[Sequence], admits: bool, room: int) -> int:
        """Pending tokens of prompts that can be worked on now, as far as it matters."""
        backlog = sum(sequence.num_pending_tokens for sequence in half_prefilled)
        if admits:
            enough = room * _PASSES_LOOKED_AHEAD
            for sequence in self._waiting.line[: self.max_sequences - len(self._running)]:
                if backlog >= enough:
                    break
                backlog += sequence.num_pending_tokens
        return backlog

    def _admit(self, sequence: Sequence, builder: StepPlanBuilder) -> bool:
        """Lets the best waiting sequence run, with the blocks that the cache or the host buffer has for it.

        Returns False, and changes nothing, where it has to wait: for a place, for room, or for a block that it shares
        with a sequence that computes it in this very pass. The latter is there in the next pass, so it costs no more
        than a pass for each block that it saves.
        """
        if not builder.budget.left or len(self._running) >= self.max_sequences or not self.pool.num_free:
            return False
        table = self._kv_cache.cached(sequence)
        stays = self._would_stay(sequence, table) if sequence.num_preemptions else self.pool.num_free > 0
        if not stays or self._kv_cache.is_computed(sequence, table, builder):
            self.pool.release(table)
            return False
        self._waiting.remove(sequence)
        self._kv_cache.allocate(sequence, table, builder)
        insort(self._running, sequence, key=_rank)
        scheduled = builder.add_prompt(sequence)
        assert scheduled, "an admitted sequence has room for a token"
        return True

    def _would_stay(self, sequence: Sequence, table: list[int]) -> bool:
        """Is there room for all tokens of a preempted sequence and a block of growth for everyone who runs?

        It lost its blocks because they were short. Coming back on the first free one, it would compute its prompt again
        only to lose it at the next decode that needs a block: passes full of work that is thrown away.
        """
        missing = self.pool.blocks_for(len(sequence.tokens)) - len(table)
        return missing + len(self._running) <= self.pool.num_free

    def _make_room(self, sequence: Sequence, builder: StepPlanBuilder, held_back: int) -> bool:
        """Preempts the worst running sequences until `sequence` can have one more block and `held_back` are left.

        Returns False where it was itself the worst.
        """
        while self.pool.num_free <= held_back:
            victim = self._running.pop()
            self._kv_cache.preempt(victim, builder)
            self._waiting.push(victim)
            if victim is sequence:
                return False
        return True

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.is_waiting:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
        sequence.finish_reason = reason
        self._kv_cache.free(sequence)
        self._deadlines.discard(sequence)
