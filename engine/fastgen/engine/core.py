"""The step loop: schedule, run, take note, report. One thread, no callbacks, no I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from fastgen.config import EngineConfig
from fastgen.core.block_pool import BlockPool
from fastgen.core.chunking import AutomaticTarget, Chunker, FixedTarget, NoTarget, Target
from fastgen.core.constraint import Constraint
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.request import Grammar, Request, RequestError
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepModel, StepTimes
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.core.step_plan import StepPlan
from fastgen.engine.messages import StepReport, StepStats, TokenOutput


class Runner(Protocol):
    """Runs passes on a device: owns the weights and the KV cache tensors."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in `range(vocab_size)`."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""

    @property
    def block_size(self) -> int:
        """Token slots of a block."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host buffer that sequences are swapped to; 0 where there is none."""

    @property
    def seconds_per_block(self) -> float:
        """What copying a block between cache and host buffer takes, one way. Asked only where there are host blocks."""

    @property
    def max_model_length(self) -> int:
        """Longest prompt plus generation of one request; it fits in the KV cache."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Copies the blocks that the pass swaps, computes it, and samples."""


@dataclass(slots=True)
class _Tally:
    """What is counted while a report comes together; by the names of `StepStats`."""

    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    preemptions: int = 0
    swapped_out: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0


class Engine:
    """Continues prompts, many at once, a pass at a time.

    Drive it by calling `step` as long as `has_work`; requests may be added and cancelled between steps.

    Attributes:
        step_model: what is known of the time of passes; kept up with every pass. It may be seeded with measured ones.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammars: Callable[[Grammar], Constraint] | None = None,
        step_model: StepModel | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._grammars = grammars
        self._prefix_caching = config.prefix_caching
        self.step_model = step_model or StepModel()
        self._scheduler = _scheduler(runner, config, self.step_model)
        self._sequences: dict[str, Sequence] = {}
        self._num_added = 0
        self._seeds = random.SystemRandom()

    @property
    def has_work(self) -> bool:
        """Is there anything for `step` to do?"""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: when the model cannot serve it, or its id belongs to a request under way.
        """
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use: give each request its own", "request_id")
        request.check(self._runner.max_model_length, self._runner.vocab_size)
        constraint = self._constraint(request.sampling.grammar)
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            ordinal=self._num_added,
            arrival=self._clock(),
            seed=self._seeds.getrandbits(63) if seed is None else seed,
        )
        sequence.constraint = constraint
        if not self._prefix_caching:
            sequence.cache_salt = None
        self._num_added += 1
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees all that it holds at once. False if there is no such request (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.cancel(sequence)
        return True

    def step(self) -> StepReport:
        """Ends requests whose deadline has come, runs one pass with the rest and says what came of it."""
        started = self._clock()
        outputs = self._end_overdue(started)
        if not self.has_work:
            return self.idle_report(outputs)
        plan = self._scheduler.schedule()
        tally = self._tally(plan, started)
        result = self._runner.execute(plan)
        prompt_logprobs = self._new_prompt_logprobs(plan, result)
        grown = self._scheduler.complete(plan, [sampled.token_id for sampled in result.sampled])
        for sequence, sampled in zip(grown, result.sampled, strict=True):
            cached_tokens, queue_seconds = _first_report(sequence)
            outputs.append(
                TokenOutput(
                    request_id=sequence.id,
                    token_ids=[sampled.token_id],
                    finish_reason=sequence.finish_reason,
                    logprobs=None if sampled.logprobs is None else [sampled.logprobs],
                    prompt_logprobs=prompt_logprobs.pop(sequence, None),
                    cached_tokens=cached_tokens,
                    queue_seconds=queue_seconds,
                )
            )
            if sequence.finish_reason is not None:
                del self._sequences[sequence.id]
        for sequence, rows in prompt_logprobs.items():
            cached_tokens, queue_seconds = _first_report(sequence)
            outputs.append(
                TokenOutput(
                    request_id=sequence.id,
                    token_ids=[],
                    prompt_logprobs=rows,
                    cached_tokens=cached_tokens,
                    queue_seconds=queue_seconds,
                )
            )
        if not self._sequences:
            self._scheduler.check_integrity()
        tally.step_seconds = self._clock() - started
        self.step_model.observe(plan.num_tokens, plan.kv_tokens, tally.step_seconds)
        return StepReport(outputs, self._stats(tally))

    def idle_report(self, outputs: list[TokenOutput]) -> StepReport:
        """`outputs` and the state without a pass: what a cancellation leaves must be seen too."""
        return StepReport(outputs, self._stats(_Tally()))

    def _constraint(self, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine has no grammars: leave the grammar out", "grammar")
        return self._grammars(grammar)

    def _end_overdue(self, now: float) -> list[TokenOutput]:
        ended = self._scheduler.end_overdue(now)
        for sequence in ended:
            del self._sequences[sequence.id]
        return [TokenOutput(request_id=s.id, token_ids=[], finish_reason=s.finish_reason) for s in ended]

    def _tally(self, plan: StepPlan, now: float) -> _Tally:
        """What a pass does, before it is done. Marks sequences that are in a pass for the first time."""
        num_decodes = 0
        tally = _Tally(preemptions=len(plan.preempted), swapped_out=sum(bool(s.host_blocks) for s in plan.preempted))
        for chunk in plan.chunks:
            sequence = chunk.sequence
            num_decodes += sequence.is_decoding
            if sequence.first_scheduled is None:
                sequence.first_scheduled = now
                tally.queue_seconds.append(now - sequence.arrival)
                if sequence.cache_salt is not None:
                    tally.prefix_cache_query_tokens += sequence.num_prompt_tokens
                    tally.prefix_cache_hit_tokens += sequence.num_cached_tokens
        tally.decode_tokens = num_decodes
        tally.prefill_tokens = plan.num_tokens - num_decodes
        return tally

    def _new_prompt_logprobs(self, plan: StepPlan, result: StepOutput) -> dict[Sequence, list[TokenLogprobs]]:
        """Of each sequence, those of prompt tokens that were not reported before: a recomputed prompt has them again.

        Row j of a chunk tells of the prompt token after it, number `start + j + 1`.
        """
        news = {}
        for index, rows in result.prompt_logprobs.items():
            chunk = plan.chunks[index]
            sequence = chunk.sequence
            fresh = rows[max(0, sequence.num_prompt_logprobs - chunk.start) :]
            if fresh:
                sequence.num_prompt_logprobs = chunk.start + len(rows)
                news[sequence] = fresh
        return news

    def _stats(self, tally: _Tally) -> StepStats:
        state = self._scheduler.stats(self._clock())
        return StepStats(
            step_seconds=tally.step_seconds,
            prefill_tokens=tally.prefill_tokens,
            decode_tokens=tally.decode_tokens,
            queue_seconds=tally.queue_seconds,
            preemptions=tally.preemptions,
            swapped_out=tally.swapped_out,
            prefix_cache_query_tokens=tally.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=tally.prefix_cache_hit_tokens,
            step_model=self.step_model.coefficients,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_swapped=state.num_swapped,
            kv_tokens=state.kv_tokens,
            kv_blocks_used=state.kv_blocks_used,
            backlog_prompt_tokens=state.backlog_prompt_tokens,
            oldest_waiting_seconds=state.oldest_waiting_seconds,
        )


def _first_report(sequence: Sequence) -> tuple[int | None, float | None]:
    """What the prefix cache had for a sequence and how long it was queued, the first time that it is reported on."""
    if sequence.is_reported or sequence.first_scheduled is None:
        return None, None
    sequence.is_reported = True
    return sequence.num_cached_tokens, sequence.first_scheduled - sequence.arrival


def _scheduler(runner: Runner, config: EngineConfig, times: StepTimes) -> Scheduler:
    host = HostBuffer(runner.num_host_blocks)
    return Scheduler(
        BlockPool(runner.num_blocks, runner.block_size),
        token_budget=config.most_tokens,
        max_sequences=config.sequence_limit,
        end_tokens=runner.eos_token_ids,
        chunker=Chunker(cast(Literal["even", "greedy"], config.chunking), _target(config.inter_token_target, times)),
        host=host,
        preemption=Preemption(
            cast(Literal["auto", "recompute", "swap"], config.preemption),
            times,
            runner.seconds_per_block if host.num_blocks else 0.0,
        ),
    )


def _target(setting: int | str, times: StepTimes) -> Target:
    if isinstance(setting, int):
        return FixedTarget(setting / 1000, times)
    return AutomaticTarget(times) if setting == "auto" else NoTarget()
