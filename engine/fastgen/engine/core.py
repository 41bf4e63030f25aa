"""The step loop: schedule, execute, record, report. Single-threaded, without callbacks or I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal, Protocol, cast

from fastgen.config import EngineConfig
from fastgen.core.block_pool import BlockPool
from fastgen.core.chunking import AutomaticTarget, Chunker, FixedTarget, NoTarget, Target
from fastgen.core.constraint import Constraint
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.request import Grammar, Request, RequestError
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.stats import StepStats
from fastgen.core.step_model import StepModel, StepTimes
from fastgen.core.step_output import SampledToken, StepOutput, TokenLogprobs
from fastgen.core.step_plan import StepPlan
from fastgen.engine.messages import StepReport, TokenOutput


class Runner(Protocol):
    """Runs forward passes on a device. Owns the weights and the KV cache tensors."""

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
        """Blocks of the host buffer for swapped sequences; 0 without one."""

    @property
    def seconds_per_block(self) -> float:
        """Seconds to copy a block between cache and host buffer, one way. Read only if there are host blocks."""

    @property
    def max_model_length(self) -> int:
        """Longest prompt plus generation of one request; it fits in the KV cache."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Copy the blocks that the plan swaps, compute its chunks, and sample."""


class Engine:
    """Generates for many requests at once, one step at a time.

    Call `step` while `has_work`. Requests may be added and cancelled between steps.

    Attributes:
        step_model: predicts step times, updated with every step. Pass one in to seed it with measured times.
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
        """Return whether any request is unfinished."""
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: if the model cannot serve it, or another unfinished request has its id.
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
        """End a request and free its blocks at once. Return False if it is unknown or has ended."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._scheduler.cancel(sequence)
        return True

    def step(self) -> StepReport:
        """End requests past their deadline, run one step for the others, and report the results."""
        started = self._clock()
        outputs = self._end_overdue(started)
        if not self.has_work:
            return self.report(outputs)
        plan = self._scheduler.schedule()
        stats = StepStats.of(plan, started)
        for chunk in plan.chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = started
        result = self._runner.execute(plan)
        prompt_logprobs = self._new_prompt_logprobs(plan, result)
        grown = self._scheduler.complete(plan, [sampled.token_id for sampled in result.sampled])
        for sequence, sampled in zip(grown, result.sampled, strict=True):
            outputs.append(_output(sequence, sampled, prompt_logprobs.pop(sequence, None)))
            if sequence.finish_reason is not None:
                del self._sequences[sequence.id]
        outputs += [_output(sequence, None, rows) for sequence, rows in prompt_logprobs.items()]
        if not self._sequences:
            self._scheduler.check_integrity()
        stats.step_seconds = self._clock() - started
        self.step_model.observe(plan.num_tokens, plan.kv_tokens, stats.step_seconds)
        return self.report(outputs, stats)

    def report(self, outputs: list[TokenOutput], stats: StepStats | None = None) -> StepReport:
        """Return `outputs` with the current state; without `stats` if no step was run."""
        state = self._scheduler.stats(self._clock())
        return StepReport(outputs, stats or StepStats(), state, self.step_model.coefficients)

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

    def _new_prompt_logprobs(self, plan: StepPlan, result: StepOutput) -> dict[Sequence, list[TokenLogprobs]]:
        """Return each sequence's prompt log-probabilities without those reported before a recomputation.

        Row j of a chunk belongs to prompt token `start + j + 1`.
        """
        new = {}
        for index, rows in result.prompt_logprobs.items():
            chunk = plan.chunks[index]
            sequence = chunk.sequence
            unreported = rows[max(0, sequence.num_prompt_logprobs - chunk.start) :]
            if unreported:
                sequence.num_prompt_logprobs = chunk.start + len(rows)
                new[sequence] = unreported
        return new


def _output(
    sequence: Sequence, sampled: SampledToken | None, prompt_logprobs: list[TokenLogprobs] | None
) -> TokenOutput:
    """Return what a sequence got from a step; the first output also tells cached tokens and queue time."""
    cached_tokens = queue_seconds = None
    if not sequence.is_reported and sequence.first_scheduled is not None:
        sequence.is_reported = True
        cached_tokens, queue_seconds = sequence.num_cached_tokens, sequence.first_scheduled - sequence.arrival
    return TokenOutput(
        request_id=sequence.id,
        token_ids=[] if sampled is None else [sampled.token_id],
        finish_reason=sequence.finish_reason,
        logprobs=None if sampled is None or sampled.logprobs is None else [sampled.logprobs],
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        queue_seconds=queue_seconds,
    )


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
