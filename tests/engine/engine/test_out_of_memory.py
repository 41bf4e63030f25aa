"""Steps that run out of memory: they are rolled back and retried, and no output changes."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import NoReturn

import pytest

from fastgen.core import chunking
from fastgen.core.chunking import StepLimit
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_output import StepOutput
from fastgen.engine.core import Engine
from fastgen.model.device_errors import is_device_failure, is_out_of_memory, release_cached_memory
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Mask
from support.checking import check_outcome
from support.simulation import SimulatedRunner, SimulatedTicket, make_engine, solo
from support.workloads import Outcome, Step, Workload, play, random_window, random_workload

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK = 4
WORKLOADS, WORKLOADS_WITH_STATES, WORKLOADS_WITH_WINDOWS = 50, 10, 10


class OutOfMemoryError(RuntimeError):
    """As torch's: not a MemoryError."""


class AcceleratorError(RuntimeError):
    """Named as torch's."""


def run_out(text: str = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation") -> NoReturn:
    raise OutOfMemoryError(text)


@dataclass
class ShortOfMemory(SimulatedRunner):
    """A device on which some steps run out of memory: when they are launched, sampled or waited for.

    It has begun such a step, so it leaves garbage wherever the step and the steps launched after it write. As on a GPU,
    it does so in the order of launches.
    """

    fails: Callable[[StepInput, str], bool] = lambda _step, _where: False
    failures: list[tuple[str, StepInput]] = field(default_factory=list)

    def launch(self, step: StepInput) -> SimulatedTicket:
        launched = super().launch(step)
        ticket = Attempt(self, launched.step, launched.done_at)
        self._launched[-1] = ticket
        self.check(ticket, "launch")
        return ticket

    def check(self, ticket: SimulatedTicket, where: str) -> None:
        if ticket in self._launched and self.fails(ticket.step, where):
            self.failures.append((where, ticket.step))
            for lost in list(self._launched)[self._launched.index(ticket) :]:
                assert isinstance(lost, Attempt)
                lost.is_lost = True
            run_out()

    def run_until(self, ticket: SimulatedTicket) -> None:
        self.scribble()
        while ticket in self._launched:
            first = self._launched.popleft()
            assert first.masks is not None
            first.output = self._run(first.step)
            self.scribble()
        self.clock.now = max(self.clock.now, ticket.done_at)

    def scribble(self) -> None:
        """Run the lost steps that come next."""
        while self._launched and isinstance(first := self._launched[0], Attempt) and first.is_lost:
            step = self._launched.popleft().step
            for _, host in step.swap_out.tolist():
                self._host[host][0] ^= 1
            for slot in step.slot_mapping.tolist():
                self._cache[slot // self.block_size][slot % self.block_size] = 999
            for slot in step.window_slots.tolist():
                self._window_cache[slot // self.block_size][slot % self.block_size] = 999
            for block, _ in step.swap_in.tolist():
                self._cache[block][0] ^= 1
            for slot in [*step.state_slots.tolist(), *step.state_saves[:, 2].tolist()][: self.num_state_slots]:
                self._states[slot] = 999
            for row in step.rows.tolist():
                self._last_ids[row] = 999
                self._seeds[row] = 999


@dataclass(eq=False)
class Attempt(SimulatedTicket):
    is_lost: bool = False

    def sample(self, masks: list[Mask]) -> None:
        self.runner.check(self, "sample")  # type: ignore[attr-defined]
        super().sample(masks)

    def result(self) -> StepOutput:
        self.runner.check(self, "result")  # type: ignore[attr-defined]
        return super().result()


def run(workload: Workload, runner: ShortOfMemory) -> tuple[Outcome, Engine]:
    engine = make_engine(
        runner, token_budget=workload.token_budget, max_sequences=workload.max_sequences, **workload.settings
    )

    def check(engine: Engine, step: Step) -> None:
        engine._scheduler.check_integrity()
        assert step.plan.num_tokens <= workload.token_budget

    return play(engine, workload.arrivals, check), engine


def fails_at_random(rng: random.Random, rates: tuple[float, ...]) -> Callable[[StepInput, str], bool]:
    rate = rng.choice(rates)

    def fails(step: StepInput, _where: str) -> bool:
        swaps = len(step.swap_out) or len(step.swap_in)
        # A step of one token always fits: its request would end.
        return step.num_tokens > 1 and rng.random() < (0.5 if swaps else rate)

    return fails


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_steps_that_run_out_of_memory_at_random_change_no_output(
    steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "STEPS_PER_GROWTH", 4)  # so that steps are large enough to fail again
    seen: Counter[str] = Counter()
    for seed in range(WORKLOADS + WORKLOADS_WITH_STATES + WORKLOADS_WITH_WINDOWS):
        rng = random.Random(3000 * steps_in_flight + seed)
        workload = random_workload(rng, block_size=BLOCK)
        has_window = seed >= WORKLOADS + WORKLOADS_WITH_STATES
        num_state_slots = 0 if seed < WORKLOADS or has_window else (5, 50)[seed % 2]
        # Recurrent states are computed again, for which a sequence needs some steps in a row that do not fail.
        fails = fails_at_random(rng, (0.02, 0.05) if num_state_slots else (0.05, 0.2))
        if num_state_slots or has_window:  # not swapped
            workload = replace(workload, num_host_blocks=0, settings=workload.settings | {"preemption": "recompute"})
        runner = ShortOfMemory(
            workload.num_blocks,
            BLOCK,
            workload.num_host_blocks,
            num_state_slots,
            random_window(rng, BLOCK) if has_window else None,
            steps_in_flight=steps_in_flight,
            fails=fails,
        )
        try:
            outcome, engine = run(workload, runner)
            check_outcome(outcome, workload.arrivals, engine)
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {workload}") from error
        assert sum(report.step.out_of_memory for report in outcome.reports) <= len(runner.failures)
        seen.update(where for where, _ in runner.failures)
        seen["swap out"] += sum(len(step.swap_out) > 0 for _, step in runner.failures)
        seen["swap in"] += sum(len(step.swap_in) > 0 for _, step in runner.failures)
    for what in ("launch", "sample", "result", "swap out", "swap in"):
        assert seen[what] >= 2, f"only {seen[what]} failed steps: {what}"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_device_with_memory_for_few_tokens_still_serves_everything(steps_in_flight: int) -> None:
    workload = random_workload(random.Random(7), block_size=BLOCK)
    runner = ShortOfMemory(
        workload.num_blocks,
        BLOCK,
        workload.num_host_blocks,
        steps_in_flight=steps_in_flight,
        fails=lambda step, _where: step.num_tokens > 5,
    )
    outcome, engine = run(workload, runner)
    check_outcome(outcome, workload.arrivals, engine)
    assert runner.failures
    assert len(runner.failures) < len(runner.steps) / 4, "most steps are within the memory"


def request(name: str, *, prompt: int = 10, seed: int = 0, max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, seed=seed)
    return Request(id=name, prompt_token_ids=list(range(1, prompt + 1)), sampling=sampling, cache_salt=None)


def tokens_of(engine: Engine) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_the_request_that_never_fits_is_ended(position: int, steps_in_flight: int) -> None:
    """Its step needs too much memory however few tokens it has, as a context may."""
    asked = [request(str(number), seed=number) for number in range(3)]
    greedy_rows: set[int] = set()

    def fails(step: StepInput, where: str) -> bool:
        for parameters in step.new_rows:
            (greedy_rows.add if parameters.seed == position else greedy_rows.discard)(parameters.row)
        return where == "launch" and not greedy_rows.isdisjoint(step.rows.tolist())

    runner = ShortOfMemory(32, BLOCK, steps_in_flight=steps_in_flight, fails=fails)
    engine = make_engine(runner, token_budget=16, max_sequences=4)
    for each in asked:
        engine.add(each)
    tokens, reasons = tokens_of(engine)
    for number, each in enumerate(asked):
        if number == position:
            assert reasons[each.id] is FinishReason.OUT_OF_MEMORY
            continue
        assert reasons[each.id] is FinishReason.LENGTH
        assert tokens[each.id] == [token for token, _ in zip(solo(each), range(8), strict=False)]
    assert engine._scheduler.pool.num_free == engine._scheduler.pool.num_blocks
    engine._scheduler.check_integrity()
    assert len(runner.failures) <= 2 * 5, "retries are bounded by the logarithm of the token budget"


def test_the_failed_step_is_reported_and_counted_nowhere_else() -> None:
    failing = [True]
    runner = ShortOfMemory(16, BLOCK, fails=lambda _step, _where: bool(failing and failing.pop()))
    engine = make_engine(runner, token_budget=16, max_sequences=4)
    engine.add(request("a", max_tokens=1))
    reports = [engine.step()]
    while engine.has_work:
        reports.append(engine.step())
    assert [report.step.out_of_memory for report in reports] == [1, 0, 0]
    assert [report.step.prefill_tokens for report in reports] == [0, 5, 5]
    assert [len(report.step.queue_seconds) for report in reports] == [0, 1, 0], "the queue time is that of the retry"


def test_the_log_says_what_follows_a_step_without_memory(caplog: pytest.LogCaptureFixture) -> None:
    failing = [True]
    runner = ShortOfMemory(16, BLOCK, fails=lambda _step, _where: bool(failing and failing.pop()))
    engine = make_engine(runner, token_budget=16, max_sequences=4)
    engine.add(request("several", max_tokens=1))
    tokens_of(engine)
    assert caplog.messages[-1].endswith("; the next steps will be smaller")
    failing.append(True)
    engine.add(request("alone", prompt=1))
    tokens_of(engine)
    assert caplog.messages[-1].endswith("; request alone ends, because the step had only one token")


def test_the_log_names_a_request_that_had_ended_before_its_step_ran_out_of_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing: list[bool] = []
    runner = ShortOfMemory(
        16, BLOCK, steps_in_flight=2, fails=lambda _step, where: where == "result" and bool(failing and failing.pop())
    )
    engine = make_engine(runner, token_budget=16, max_sequences=4)
    engine.add(request("gone", prompt=1))
    engine.step()
    engine.cancel("gone")
    failing.append(True)
    tokens_of(engine)
    assert caplog.messages[-1].endswith("; its only request, gone, had already ended")


def test_other_errors_are_not_retried() -> None:
    class Broken(SimulatedRunner):
        def launch(self, _step: StepInput) -> SimulatedTicket:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make_engine(Broken(16, BLOCK), token_budget=16, max_sequences=4)
    engine.add(request("a"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_the_gpu_is_idle_before_the_next_step_after_one_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost step may still write blocks that have been freed, and copies on another stream do not wait for it."""
    called: list[str] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=lambda: called.append("synchronize"),
        empty_cache=lambda: called.append("empty_cache"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    release_cached_memory()
    assert called == ["synchronize", "empty_cache"]


@pytest.mark.parametrize(
    ("error", "memory", "failure"),
    [
        (MemoryError(), True, False),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), True, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors"), False, True),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), False, True),
        (AcceleratorError("device-side assert triggered"), False, True),
        (RuntimeError("shapes do not match"), False, False),
        (ValueError("out of memory"), False, False),
    ],
)
def test_errors_are_told_apart_by_type_and_text(error: Exception, memory: bool, failure: bool) -> None:
    assert (is_out_of_memory(error), is_device_failure(error)) == (memory, failure)


def test_the_limit_halves_to_one_token_and_grows_back_to_the_budget() -> None:
    limit = StepLimit(100)
    sizes = []
    while limit.tokens > 1:
        limit.shrink(limit.tokens)
        sizes.append(limit.tokens)
    assert sizes == [50, 25, 12, 6, 3, 1]
    grown = []
    for _ in range(8 * chunking.STEPS_PER_GROWTH):
        limit.record()
        grown.append(limit.tokens)
    assert grown[chunking.STEPS_PER_GROWTH - 2 :][:2] == [1, 2]
    assert grown[-1] == 100
