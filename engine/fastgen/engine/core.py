"""The step loop: schedule, launch, settle, report. Single-threaded, without callbacks or I/O."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.request import FinishReason, Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.stats import StepStats, StepTrace
from fastgen.core.step_model import StepModel
from fastgen.core.step_output import StepOutput
from fastgen.core.step_plan import StepPlan
from fastgen.engine.step_results import add_pooled, new_prompt_logprobs, pooled_result, token_output
from fastgen.link.messages import StepReport, TokenOutput
from fastgen.model import first_line
from fastgen.model.device_errors import is_out_of_memory, release_cached_memory
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.interface import Mask, Runner, Ticket
from fastgen.settings import EngineConfig
from fastgen.text.grammars.compiled import CompiledGrammar, CompiledGrammars

log = logging.getLogger("fastgen.engine.core")

# Seconds between two checks for new requests while nothing runs and all requests wait for their grammars.
_GRAMMAR_SECONDS = 0.005


@dataclass(slots=True)
class _Launched:
    """A step in flight.

    Attributes:
        started: when it was scheduled.
        first_scheduled: the sequences that no earlier step computed.
        ticket: None until it is launched, and once it has run out of memory.
        awaits_masks: whether its sampling is not yet enqueued, because its grammar masks depend on earlier results.
        lacking_masks: sequences whose grammar's mask was not known in time.
        out_of_memory: text of the error if it ran out of memory; it has no results then.
    """

    plan: StepPlan
    step: StepInput
    stats: StepStats
    started: float
    first_scheduled: list[Sequence]
    ticket: Ticket | None = None
    awaits_masks: bool = True
    lacking_masks: list[Sequence] = field(default_factory=list)
    out_of_memory: str | None = None

    @property
    def holds_back(self) -> bool:
        """Whether no step can be launched after this one yet."""
        return self.awaits_masks or self.ticket is None

    @contextmanager
    def catching_out_of_memory(self) -> Iterator[None]:
        """Set `out_of_memory` if the body runs out of memory, and drop the step's tensors.

        Other errors propagate.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.out_of_memory = first_line(error)
            self.ticket = None

    def sample(self, masks: list[Mask]) -> None:
        with self.catching_out_of_memory():
            assert self.ticket is not None
            self.ticket.sample(masks)
        self.awaits_masks = False

    def result(self) -> StepOutput | None:
        """Wait for the results; None if the step ran out of memory."""
        with self.catching_out_of_memory():
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

    A sequence whose grammar's mask is not known in time is sampled without it. The token is discarded, and the sequence
    is left out of steps until the mask is known, so that no other sequence waits for it.

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
        grammars: CompiledGrammars | None = None,
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
            BlockPool(runner.num_blocks, runner.block_size, runner.num_state_slots, runner.window_group),
            HostBuffer(runner.num_host_blocks),
            seconds_per_block=runner.seconds_per_block,
            end_tokens=runner.eos_token_ids,
            times=self.step_model,
        )
        self._step_inputs = StepInputBuilder(runner.block_size, has_window=runner.window_group is not None)
        self._in_flight: deque[_Launched] = deque()
        self._last_settled = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, Future[CompiledGrammar]] = {}  # grammars by request id
        self._num_added = 0
        self._seeds = random.SystemRandom()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step in flight."""
        return bool(self._in_flight) or self._scheduler.has_work or bool(self._compiling)

    def add(self, request: Request) -> None:
        """Queue a request, or compile its grammar in the background and queue it then.

        Raises:
            RequestError: if the model cannot serve it, another unfinished request has its id, or it has a grammar and
                the engine was created without grammars.
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
        """End a request; return False if it is unknown or has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._scheduler.cancel(sequence)
        self._drop(sequence)
        return True

    def step(self) -> StepReport:
        """End requests past their deadline, launch as many steps as may be in flight, and report the oldest.

        If no step is in flight, the report has none. If nothing has ended either, wait briefly for a grammar first.
        """
        outputs = self._ends(self._scheduler.end_overdue(self._clock())) + self._release_compiled()
        while len(self._in_flight) < self._runner.steps_in_flight and self._launch():
            pass
        if not self._in_flight:
            if not outputs:
                self._wait_for_grammars()
            return self.report(outputs)
        launched = self._in_flight.popleft()
        result = launched.result()
        if result is None:
            outputs += self._roll_back(launched)
            return self.report(outputs, StepStats(out_of_memory=1, preemptions=launched.stats.preemptions))
        outputs += self._settle(launched, result)
        if self._in_flight and self._in_flight[0].awaits_masks and self._in_flight[0].ticket is not None:
            self._sample(self._in_flight[0])
        now, stats = self._clock(), launched.stats
        # A step that overlaps with the one before it takes as long as it delays the results.
        stats.step_seconds = now - max(launched.started, self._last_settled)
        stats.eager_reason = result.eager_reason
        self._last_settled = now
        self.step_model.observe(launched.plan.work, stats.step_seconds)
        return self.report(outputs, stats, launched.plan)

    def _wait_for_grammars(self) -> None:
        """Wait a little: nothing can run before a grammar is compiled, or the next mask of one is known."""
        if self._compiling:
            wait(self._compiling.values(), _GRAMMAR_SECONDS, FIRST_COMPLETED)
        elif self._scheduler.has_work:
            time.sleep(_GRAMMAR_SECONDS)

    def _launch(self) -> bool:
        """Schedule and launch a step. Return False if there is none to launch before the next results."""
        if not self._scheduler.has_work or any(launched.holds_back for launched in self._in_flight):
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
        with launched.catching_out_of_memory():
            launched.ticket = self._runner.launch(step)
        # A grammar's mask depends on the token before, which a step in flight may still sample.
        if launched.ticket is not None and not (len(step.masked) and self._in_flight):
            self._sample(launched)
        self._in_flight.append(launched)
        return True

    def _roll_back(self, failed: _Launched) -> list[TokenOutput]:
        """Undo a step that ran out of memory and those after it; return the end of a request that cannot run."""
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
        if plan.num_tokens > 1:
            consequence = "the next steps will be smaller"
        elif ended is None:
            consequence = f"its only request, {plan.sequences[0].id}, had already ended"
        else:
            consequence = f"request {ended.id} ends, because the step had only one token"
        log.warning(
            "a step of %d tokens, %d sequences, ran out of memory (%s); %s",
            plan.num_tokens,
            len(plan.sequences),
            failed.out_of_memory,
            consequence,
        )
        release_cached_memory()
        return [] if ended is None else self._ends([ended])

    def _sample(self, launched: _Launched) -> None:
        """Compute the masks of a step, while its forward pass may still run, and enqueue its sampling."""
        masked = [launched.plan.sequences[index] for index in launched.step.sampled[launched.step.masked].tolist()]
        masks, launched.lacking_masks = self._masks(masked) if masked else ([], [])
        for sequence in launched.lacking_masks:
            sequence.lack_mask()
        launched.sample(masks)

    def _masks(self, sequences: list[Sequence]) -> tuple[list[Mask], list[Sequence]]:
        """Return the masks of sequences with grammars, and the sequences whose mask is not known in time.

        These, and those that have ended, get any token, which will be discarded. So none waits for another one's mask.
        """
        lacking: list[Sequence] = []
        masks = np.full((len(sequences), -(-self._runner.vocab_size // 32)), ~np.uint32(0))
        constraints = {
            index: sequence.constraint
            for index, sequence in enumerate(sequences)
            if sequence.constraint is not None and sequence.finish_reason is None
        }
        if constraints:
            assert self._grammars is not None
            filled = np.zeros((len(constraints), masks.shape[1]), np.uint32)
            late = self._grammars.fill_masks(list(constraints.values()), filled.reshape(-1).data)
            indices = list(constraints)
            filled[late] = ~np.uint32(0)
            masks[indices] = filled
            lacking = [sequences[indices[row]] for row in late]
        return list(masks), lacking

    def _settle(self, launched: _Launched, result: StepOutput) -> list[TokenOutput]:
        """Record the results of a step and return what they add to each request's output."""
        plan, outputs = launched.plan, []
        prompt_logprobs = new_prompt_logprobs(plan, result)
        pooled = add_pooled(plan, result)
        only_tokens = not result.logprobs and not prompt_logprobs
        grown = self._scheduler.settle(plan, result.token_ids)
        for lacking in launched.lacking_masks:
            self._step_inputs.release(lacking)  # the runner's row has the discarded token
        for index, (sequence, token) in enumerate(zip(grown, result.token_ids, strict=True)):
            if sequence is None:
                continue
            if only_tokens and sequence.is_reported and sequence.finish_reason is None:
                outputs.append(TokenOutput(sequence.id, [token]))
                continue
            logprobs = result.logprobs.get(index)
            outputs.append(token_output(sequence, [token], logprobs, prompt_logprobs.pop(sequence, None)))
            if sequence.finish_reason is not None:
                self._drop(sequence)
        for sequence, entries in pooled.items():
            if sequence.finish_reason is not None:
                outputs.append(token_output(sequence, [], pooled=pooled_result(sequence, entries)))
                self._drop(sequence)
        return outputs + [token_output(sequence, [], None, rows) for sequence, rows in prompt_logprobs.items()]

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._compiling.pop(sequence.id, None)
        self._step_inputs.release(sequence)
        del self._sequences[sequence.id]

    def _ends(self, ended: list[Sequence]) -> list[TokenOutput]:
        """Forget sequences that have ended outside of a step; return their last outputs."""
        for sequence in ended:
            self._drop(sequence)
        return [TokenOutput(sequence.id, [], sequence.finish_reason) for sequence in ended]

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants. Takes time proportional to the KV blocks: call it when idle."""
        self._scheduler.check_integrity()

    def prepare_grammars(self) -> None:
        """Prepare in the background for the first grammar. Call it before the first step, which it may delay."""
        if self._grammars is not None:
            self._grammars.prepare()

    def report(
        self, outputs: list[TokenOutput], stats: StepStats | None = None, plan: StepPlan | None = None
    ) -> StepReport:
        """Return `outputs` with the current state. Omit `stats` and `plan` if no step was run."""
        state = self._scheduler.stats(self._clock())
        trace = StepTrace.of(plan, self._scheduler.running, self._scheduler.waiting) if self.is_watched else None
        num_finished = sum(output.finish_reason is not None for output in outputs)
        return StepReport(outputs, stats or StepStats(), state, self.step_model.coefficients, trace, num_finished)

    def _compile(self, grammar: Grammar | None) -> Future[CompiledGrammar] | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine has no grammars: leave the grammar out", "grammar")
        return self._grammars.compile(grammar)

    def _release_compiled(self) -> list[TokenOutput]:
        """Queue the requests whose grammar has been compiled; return the ends of those with an invalid one."""
        invalid = []
        for request_id in [request_id for request_id, compiled in self._compiling.items() if compiled.done()]:
            sequence, compiled = self._sequences[request_id], self._compiling.pop(request_id)
            error = compiled.exception()
            if error is None:
                sequence.constraint = compiled.result()()
                self._scheduler.release(sequence)
            else:
                # The server has checked the grammar, but over a smaller vocabulary.
                log.error("request %s ends: %s", request_id, error)
                self._scheduler.cancel(sequence, FinishReason.GRAMMAR)
                invalid.append(sequence)
        return self._ends(invalid)
