"""Dynamic SplitFuse: which tokens go into the next forward pass.

DeepSpeed-FastGen (Holmes et al., 2024), section 3.2: long prompts are split over several passes, and short prompts and
all running generations are fused into the same pass, so that every pass carries about the same number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from fastgen.core.blocks import BlockPool
from fastgen.core.budget import TokenBudget
from fastgen.core.request import FinishReason
from fastgen.core.sequence import Sequence
from fastgen.core.stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a pass: `sequence.tokens[start : start + num_tokens]`, at positions from `start`.

    `samples`: does a token follow this chunk? Only a sequence's last pending token has logits worth sampling.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.start == self.sequence.num_computed_tokens
        assert 1 <= self.num_tokens <= self.sequence.num_pending_tokens
        # Settled here: the sequence grows once the pass is done, the chunk must not change with it.
        object.__setattr__(self, "samples", self.num_tokens == self.sequence.num_pending_tokens)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass computes: chunks of one token first, then longer ones, and who lost its blocks for it.

    Attributes:
        swap_out: (block of the cache, block of the host buffer): copied before anything else, so that the block may be
            written in this very pass.
        swap_in: the same pairs, copied the other way after those, before anything is computed.
    """

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Forward tokens of the pass."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Owns the sequences alive and the block pool. Running sequences hold blocks; waiting ones hold none.

    Both are in order of arrival, and every running sequence arrived before every waiting one. That is why a preempted
    sequence, always the newest running, belongs at the front of the queue, and why nobody starves: the oldest sequence
    is never preempted while another runs, so it always gets on.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_sequences: int, end_tokens: frozenset[int]) -> None:
        assert 1 <= max_sequences <= token_budget, "each running sequence takes a token of every pass"
        self.pool = pool
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self._end_tokens = end_tokens
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    @property
    def running(self) -> Row[Sequence]:
        """Sequences that hold blocks, oldest first."""
        return self._running

    @property
    def waiting(self) -> Row[Sequence]:
        """Sequences that hold none, oldest first."""
        return self._waiting

    @property
    def has_work(self) -> bool:
        """Is any sequence alive?"""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. All it will ever need must fit in the pool when it is alone."""
        longest = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        assert self.pool.blocks_for(longest) <= self.pool.num_blocks, f"{sequence} can never fit"
        assert sequence.num_computed_tokens == 0
        newest = self._waiting[-1] if self._waiting else self._running[-1] if self._running else None
        assert newest is None or newest.ordinal < sequence.ordinal
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is and frees its blocks."""
        if sequence.block_table:
            self._running.remove(sequence)
            self.pool.release(sequence.block_table)
        else:
            self._waiting.remove(sequence)
        sequence.finish_reason = FinishReason.ABORT

    def schedule(self) -> Pass:
        """Fills the next pass: every running decode, then half-prefilled prompts, then waiting ones in order.

        Blocks are taken for what the pass computes, never for what a request may need one day.
        """
        budget = TokenBudget(self.token_budget)
        preempted: list[Sequence] = []
        decodes = self._schedule_decodes(budget, preempted)
        prompts = self._continue_prompts(budget)
        if not preempted:
            prompts += self._admit(budget)
        chunks = sorted(decodes + prompts, key=lambda chunk: chunk.num_tokens > 1)
        assert chunks or not self.has_work, "work is there and nothing was scheduled"
        return Pass(tuple(chunks), tuple(preempted))

    def complete(self, pass_: Pass, sampled: Row[int]) -> list[Sequence]:
        """Takes note of a finished pass.

        Args:
            pass_: the pass that `schedule` returned last.
            sampled: one token for each chunk that samples, in the order of the chunks.

        Returns:
            The sequences that got a token, in the order of the chunks; those that ended have a `finish_reason` and
            hold no blocks any more.
        """
        tokens = iter(sampled)
        grown = []
        for chunk in pass_.chunks:
            chunk.sequence.advance(chunk.num_tokens)
            if chunk.samples:
                chunk.sequence.append(next(tokens), self._end_tokens)
                grown.append(chunk.sequence)
        assert next(tokens, None) is None, "more tokens were sampled than chunks sample"
        for sequence in grown:
            if sequence.finish_reason is not None:
                self.pool.release(sequence.block_table)
        self._running = [sequence for sequence in self._running if sequence.finish_reason is None]
        return grown

    def stats(self, now: float) -> SchedulerStats:
        """What the scheduler holds at this moment; `now` is on the clock that sequences' arrivals are on."""
        decoding = sum(sequence.is_decoding for sequence in self._running)
        pending = sum(s.num_pending_tokens for s in self._running) + sum(len(s.tokens) for s in self._waiting)
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_tokens=sum(s.num_computed_tokens for s in self._running),
            kv_blocks_used=self.pool.num_blocks - self.pool.num_free,
            backlog_prompt_tokens=pending - decoding,
            oldest_waiting_seconds=max(0.0, now - self._waiting[0].arrival) if self._waiting else 0.0,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between passes."""
        self.pool.check_integrity([sequence.block_table for sequence in self._running])
        everyone = [*self._running, *self._waiting]
        ordinals = [sequence.ordinal for sequence in everyone]
        assert ordinals == sorted(set(ordinals)), "sequences are out of order"
        assert len(self._running) <= self.max_sequences
        for sequence in self._running:
            assert 0 < sequence.num_computed_tokens < len(sequence.tokens)
            assert len(sequence.block_table) == self.pool.blocks_for(sequence.num_computed_tokens)
        for sequence in self._waiting:
            assert sequence.num_computed_tokens == 0
            assert not sequence.block_table

    def _schedule_decodes(self, budget: TokenBudget, preempted: list[Sequence]) -> list[Chunk]:
        """A token for every running sequence that has one pending; the newest running one pays where blocks lack."""
        chunks = []
        for sequence in [s for s in self._running if s.num_pending_tokens == 1]:
            while sequence.block_table and self.pool.room(sequence.block_table, sequence.num_computed_tokens) < 1:
                preempted.append(self._preempt_newest())
            if sequence.block_table:
                chunks.append(self._take(sequence, 1, budget))
        return chunks

    def _continue_prompts(self, budget: TokenBudget) -> list[Chunk]:
        """More of the prompts that are half in the cache, oldest first, as far as budget and free blocks go."""
        chunks = []
        for sequence in self._running:
            if sequence.num_pending_tokens > 1 and budget.left:
                room = self.pool.room(sequence.block_table, sequence.num_computed_tokens)
                size = min(sequence.num_pending_tokens, budget.left, room)
                if size:
                    chunks.append(self._take(sequence, size, budget))
        return chunks

    def _admit(self, budget: TokenBudget) -> list[Chunk]:
        """First chunks of waiting sequences, in order: one that does not fit is not overtaken."""
        chunks = []
        while self._waiting and budget.left and len(self._running) < self.max_sequences:
            sequence = self._waiting[0]
            if sequence.num_preemptions and not self._would_stay(sequence):
                break
            size = min(sequence.num_pending_tokens, budget.left, self.pool.room([], 0))
            if not size:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            chunks.append(self._take(sequence, size, budget))
        return chunks

    def _would_stay(self, sequence: Sequence) -> bool:
        """Is there room for all tokens of a preempted sequence and a block of growth for everyone who runs?

        It lost its blocks because they were short. Coming back on the first free one, it would compute its prompt again
        only to lose it at the next decode that needs a block: passes full of work that is thrown away.
        """
        return self.pool.blocks_for(len(sequence.tokens)) + len(self._running) <= self.pool.num_free

    def _take(self, sequence: Sequence, size: int, budget: TokenBudget) -> Chunk:
        budget.take(size)
        self.pool.extend(sequence.block_table, sequence.num_computed_tokens + size)
        return Chunk(sequence, sequence.num_computed_tokens, size)

    def _preempt_newest(self) -> Sequence:
        """Takes the blocks of the sequence that arrived last and puts it at the front of the queue (recompute)."""
        victim = self._running.pop()
        self.pool.release(victim.block_table)
        victim.forget()
        victim.num_preemptions += 1
        self._waiting.appendleft(victim)
        return victim
