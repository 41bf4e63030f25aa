"""The step loop: schedule, launch, settle, report. Single-threaded, without callbacks or I/O."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fastgen.config import EngineConfig
from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.constraint import Constraint, Grammars, NewConstraint
from fastgen.core.request import FinishReason, Grammar, Request, RequestError
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.stats import StepStats, StepTrace
from fastgen.core.step_model import StepModel
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.core.step_plan import StepPlan
from fastgen.engine.messages import StepReport, TokenOutput
from fastgen.engine.pooling import Pools
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.device_errors import first_line, is_out_of_memory, release_cached_memory

log = logging.getLogger("fastgen.engine.core")

Mask = npt.NDArray[np.uint32]

# While nothing runs and grammars are being compiled, new requests are looked for this often.
_COMPILING_SECONDS = 0.005


class Ticket(Protocol):
    """A step that was launched. Call `sample` once, then `result` once."""

    def sample(self, masks: list[Mask]) -> None:
        """Enqueue the sampling. Does not wait for the device.

        Args:
            masks: the tokens that grammars allow, for each of `StepInput.masked`; see `Constraint.fill_mask`.
        """

    def result(self) -> StepOutput:
        """Wait for the step and return its results."""


@dataclass(frozen=True, slots=True)
class CompletedTicket:
    """The ticket of a runner that computes a step when it is launched, as simulated devices do."""

    output: StepOutput

    def sample(self, masks: list[Mask]) -> None:
        """Ignore the masks: the step has been sampled."""

    def result(self) -> StepOutput:
        """Return the results."""
        return self.output


class Runner(Protocol):
    """Runs steps on a device. Owns the weights, the KV cache tensors and the state of running sequences."""

    @property
    def steps_in_flight(self) -> int:
        """Steps that may be launched before the results of the first are read; 1 without overlap."""

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

    def launch(self, step: StepInput) -> Ticket:
        """Enqueue a step: its swaps, its state updates and its forward pass. A device is not waited for."""


@dataclass(slots=True)
class _Launched:
    """A step in flight.

    Attributes:
        awaits_masks: whether its sampling is not yet enqueued, because its grammar masks depend on earlier results.
        started: when it was scheduled.
        first_scheduled: the sequences that no earlier step computed.
        ticket: None until it was launched.
        out_of_memory: text of the error if it ran out of memory; it has no results then.
    """

    plan: StepPlan
    step: StepInput
    stats: StepStats
    started: float
    first_scheduled: list[Sequence]
    ticket: Ticket | None = None
    awaits_masks: bool = True
    out_of_memory: str | None = None

    @contextmanager
    def noting_out_of_memory(self) -> Iterator[None]:
        """Set `out_of_memory` if the body runs out of memory, and drop the step's tensors. Other errors pass."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.out_of_memory = first_line(error)
            self.ticket = None

    def sample(self, masks: list[Mask]) -> None:
        with self.noting_out_of_memory():
            assert self.ticket is not None
            self.ticket.sample(masks)
        self.awaits_masks = False

    def result(self) -> StepOutput | None:
        """Wait for the results; None if the step ran out of memory."""
        with self.noting_out_of_memory():
            if self.ticket is not None:
                return self.ticket.result()
        return None


class Engine:
    """Generates for many requests at once, step by step.

    Call `step` while `has_work`. Requests may be added and cancelled between steps.

    A runner that overlaps steps is given the next step before the results of the last are read, so the device does not
    wait for the host. An end is then found one step late: the token that the next step samples is discarded.

    A step that runs out of memory is rolled back, with the steps launched after it. The next steps are smaller. A
    request that runs out of memory alone, with one token, ends with `FinishReason.OUT_OF_MEMORY`.

    Attributes:
        step_model: predicts step times, updated with every step. Pass one in to seed it with measured times.
        is_watched: whether reports have a trace.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammars: Grammars | None = None,
        step_model: StepModel | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._grammars = grammars
        self.is_watched = False
        self._prefix_caching = config.prefix_caching
        self.step_model = step_model or StepModel()
        self._scheduler = Scheduler.of(
            config,
            BlockPool(runner.num_blocks, runner.block_size),
            HostBuffer(runner.num_host_blocks),
            seconds_per_block=runner.seconds_per_block if runner.num_host_blocks else 0.0,
            end_tokens=runner.eos_token_ids,
            times=self.step_model,
        )
        self._step_inputs = StepInputBuilder(runner.block_size)
        self._in_flight: deque[_Launched] = deque()
        self._last_settled = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, Future[NewConstraint]] = {}  # grammars by request id
        self._num_added = 0
        self._seeds = random.SystemRandom()

    @property
    def has_work(self) -> bool:
        """Return whether any request is unfinished or any step in flight."""
        return bool(self._in_flight) or self._scheduler.has_work or bool(self._compiling)

    def add(self, request: Request) -> None:
        """Queue a request. One with a grammar is queued when that has been compiled, in the background.

        Raises:
            RequestError: if the model cannot serve it, or another unfinished request has its id.
        """
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use: give each request its own", "request_id")
        request.check(self._runner.max_model_length, self._runner.vocab_size)
        compiled = self._compile(request.sampling.grammar)
        seed = request.sampling.seed
        sequence = Sequence(
            request,
            ordinal=self._num_added,
            arrival=self._clock(),
            seed=self._seeds.getrandbits(63) if seed is None else seed,
        )
        if not self._prefix_caching:
            sequence.cache_salt = None
        self._num_added += 1
        self._sequences[request.id] = sequence
        if compiled is None:
            self._scheduler.add(sequence)
        else:
            self._scheduler.hold(sequence)
            self._compiling[request.id] = compiled

    def cancel(self, request_id: str) -> bool:
        """End a request. Its blocks are free when no step in flight writes them.

        Returns:
            False if the request is unknown or has ended.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._compiling.pop(request_id, None)
        self._scheduler.cancel(sequence)
        self._step_inputs.release(sequence)
        return True

    def step(self) -> StepReport:
        """End requests past their deadline, launch as many steps as may be in flight, and report the oldest."""
        outputs = self._end_overdue(self._clock()) + self._release_compiled()
        while len(self._in_flight) < self._runner.steps_in_flight and self._launch():
            pass
        if not self._in_flight:
            if self._compiling and not outputs:
                wait(self._compiling.values(), _COMPILING_SECONDS, FIRST_COMPLETED)
            return self.report(outputs)
        launched = self._in_flight.popleft()
        result = launched.result()
        if result is None:
            outputs += self._roll_back(launched)
            return self.report(outputs, StepStats(out_of_memory=1, preemptions=launched.stats.preemptions))
        outputs += self._settle(launched, result)
        for following in self._in_flight:
            if following.awaits_masks and following.ticket is not None:
                self._sample(following)
        now, stats = self._clock(), launched.stats
        # A step that overlaps with the one before it takes as long as it delays the results.
        stats.step_seconds = now - max(launched.started, self._last_settled)
        stats.eager_reason = result.eager_reason
        self._last_settled = now
        self.step_model.observe(launched.plan.num_tokens, launched.plan.kv_tokens, stats.step_seconds)
        return self.report(outputs, stats, launched.plan)

    def _launch(self) -> bool:
        """Schedule and launch a step. Return False if there is none to launch before the next results."""
        if not self._scheduler.has_work or any(map(_holds_back, self._in_flight)):
            return False
        started = self._clock()
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        stats = StepStats.of(plan, started)
        new = [s for s in plan.sequences[plan.num_continued :] if s.first_scheduled is None]
        for sequence in new:
            sequence.first_scheduled = started
        step = self._step_inputs.build(plan)
        launched = _Launched(plan, step, stats, started, new)
        with launched.noting_out_of_memory():
            launched.ticket = self._runner.launch(step)
        # A grammar's mask depends on the token before, which a step in flight may still sample.
        if launched.ticket is not None and not (len(step.masked) and self._in_flight):
            self._sample(launched)
        self._in_flight.append(launched)
        return True

    def _roll_back(self, failed: _Launched) -> list[TokenOutput]:
        """Undo a step that ran out of memory, and all steps launched after it.

        Return the end of a request that cannot run, if any.
        """
        lost = [failed, *self._in_flight]
        self._in_flight.clear()
        for launched in reversed(lost):
            launched.ticket = None  # frees its tensors
            self._scheduler.roll_back(launched.plan)
            for sequence in launched.first_scheduled:
                sequence.first_scheduled = None
            for sequence in launched.plan.sequences:
                # The runner may have applied the step's updates to its row or not: the sequence gets a new one.
                self._step_inputs.release(sequence)
        plan, ended = failed.plan, self._scheduler.reduce_steps(failed.plan)
        log.warning(
            "a step of %d tokens, %d sequences, ran out of memory (%s); %s",
            plan.num_tokens,
            len(plan.sequences),
            failed.out_of_memory,
            "the next steps will be smaller"
            if ended is None
            else f"request {ended.id} ends, because it was alone in it",
        )
        release_cached_memory()
        if ended is None:
            return []
        del self._sequences[ended.id]
        return [TokenOutput(request_id=ended.id, token_ids=[], finish_reason=ended.finish_reason)]

    def _sample(self, launched: _Launched) -> None:
        """Compute the masks of a step, while its forward pass may still run, and enqueue its sampling."""
        masked = [launched.plan.sequences[index] for index in launched.step.sampled[launched.step.masked].tolist()]
        launched.sample(self._masks(masked) if masked else [])

    def _masks(self, sequences: list[Sequence]) -> list[Mask]:
        """Return the masks of sequences with grammars. An ended one may get any token: it will be discarded."""
        masks = np.full((len(sequences), -(-self._runner.vocab_size // 32)), ~np.uint32(0))
        running = [index for index, sequence in enumerate(sequences) if sequence.finish_reason is None]
        if running:
            assert self._grammars is not None
            filled = np.zeros((len(running), masks.shape[1]), np.uint32)
            self._grammars.fill_masks([_constraint_of(sequences[index]) for index in running], filled.reshape(-1).data)
            masks[running] = filled
        return list(masks)

    def _settle(self, launched: _Launched, result: StepOutput) -> list[TokenOutput]:
        """Record the results of a step and return what they add to each request's output."""
        plan, outputs = launched.plan, []
        prompt_logprobs = self._new_prompt_logprobs(plan, result)
        pools = Pools.of(plan, result)
        only_tokens = not result.logprobs and not prompt_logprobs
        grown = self._scheduler.settle(plan, result.token_ids)
        for index, (sequence, token) in enumerate(zip(grown, result.token_ids, strict=True)):
            if sequence is None:
                continue
            if only_tokens and sequence.is_reported and sequence.finish_reason is None:
                outputs.append(TokenOutput(sequence.id, [token]))
                continue
            logprobs = result.logprobs.get(index)
            outputs.append(_output(sequence, [token], logprobs, prompt_logprobs.pop(sequence, None)))
            if sequence.finish_reason is not None:
                self._drop(sequence)
        for sequence, pooled in pools.finished():
            outputs.append(_output(sequence, [], None, None, pooled))
            self._drop(sequence)
        return outputs + [_output(sequence, [], None, rows) for sequence, rows in prompt_logprobs.items()]

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._step_inputs.release(sequence)
        del self._sequences[sequence.id]

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants. Takes time proportional to the cached blocks: call it when idle."""
        self._scheduler.check_integrity()

    def prepare_grammars(self) -> None:
        """Do in the background what the first grammar needs.

        It may delay steps once: call it before the first one.
        """
        if self._grammars is not None:
            self._grammars.prepare()

    def report(
        self, outputs: list[TokenOutput], stats: StepStats | None = None, plan: StepPlan | None = None
    ) -> StepReport:
        """Return `outputs` with the current state; without `stats` and `plan` if no step was run."""
        state = self._scheduler.stats(self._clock())
        trace = StepTrace.of(plan, self._scheduler.running, self._scheduler.waiting) if self.is_watched else None
        num_finished = sum(output.finish_reason is not None for output in outputs)
        return StepReport(outputs, stats or StepStats(), state, self.step_model.coefficients, trace, num_finished)

    def _compile(self, grammar: Grammar | None) -> Future[NewConstraint] | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine has no grammars: leave the grammar out", "grammar")
        return self._grammars.compile(grammar)

    def _release_compiled(self) -> list[TokenOutput]:
        """Queue the requests whose grammar has been compiled.

        Return the ends of those whose grammar is invalid.
        """
        outputs = []
        for request_id in [request_id for request_id, compiled in self._compiling.items() if compiled.done()]:
            sequence, compiled = self._sequences[request_id], self._compiling.pop(request_id)
            error = compiled.exception()
            if error is None:
                sequence.constraint = compiled.result()()
                self._scheduler.release(sequence)
                continue
            # The server has checked the grammar, but over a smaller vocabulary.
            log.error("request %s ends: %s", request_id, error)
            self._scheduler.cancel(sequence)
            del self._sequences[request_id]
            outputs.append(TokenOutput(request_id, [], finish_reason=FinishReason.ABORT))
        return outputs

    def _end_overdue(self, now: float) -> list[TokenOutput]:
        ended = self._scheduler.end_overdue(now)
        for sequence in ended:
            self._compiling.pop(sequence.id, None)
            self._drop(sequence)
        return [TokenOutput(request_id=s.id, token_ids=[], finish_reason=s.finish_reason) for s in ended]

    def _new_prompt_logprobs(self, plan: StepPlan, result: StepOutput) -> dict[Sequence, list[TokenLogprobs]]:
        """Return each sequence's prompt log-probabilities without those reported before a recomputation.

        Row j of a chunk belongs to prompt token `start + j + 1`.
        """
        new = {}
        for index, rows in result.prompt_logprobs.items():
            sequence, start = plan.sequences[index], plan.starts[index]
            if sequence.finish_reason is not None or sequence.pooling is not None:
                continue
            unreported = rows[max(0, sequence.num_prompt_logprobs - start) :]
            if unreported:
                sequence.num_prompt_logprobs = start + len(rows)
                new[sequence] = unreported
        return new


def _holds_back(launched: _Launched) -> bool:
    """Return whether no step can be launched after this one yet."""
    return launched.awaits_masks or launched.ticket is None


def _output(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: TokenLogprobs | None,
    prompt_logprobs: list[TokenLogprobs] | None,
    pooled: bytes | None = None,
) -> TokenOutput:
    """Return what a sequence got from a step; the first output also tells cached tokens and queue time."""
    cached_tokens = queue_seconds = None
    if not sequence.is_reported and sequence.first_scheduled is not None:
        sequence.is_reported = True
        cached_tokens, queue_seconds = sequence.num_cached_tokens, sequence.first_scheduled - sequence.arrival
    return TokenOutput(
        request_id=sequence.id,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        queue_seconds=queue_seconds,
        pooled=pooled,
    )


def _constraint_of(sequence: Sequence) -> Constraint:
    assert sequence.constraint is not None
    return sequence.constraint
