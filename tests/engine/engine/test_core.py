"""Reports of the engine's step loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest

from fastgen.core.constraint import Constraint
from fastgen.core.request import FinishReason, Pooling, Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.stats import StepStats, StepTrace
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.core.step_times import StepWork
from fastgen.engine.core import Engine
from fastgen.link.messages import TokenOutput
from fastgen.model.step_input import StepInput
from fastgen.settings import EngineConfig
from support.given_grammars import Given
from support.simulation import SimulatedRunner, SimulatedTicket, make_engine, solo_prompt_logprobs


def request(name: str = "a", *, prompt: int = 10, deadline: float | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_tokens": 3, "temperature": 0, "ignore_eos": True, "seed": 0, **sampling})  # type: ignore[arg-type]
    return Request(id=name, prompt_token_ids=list(range(1, prompt + 1)), sampling=params, deadline_seconds=deadline)


@dataclass
class WithLogprobs(SimulatedRunner):
    """A device that returns a log-probability for each sampled token."""

    def _run(self, step: StepInput) -> StepOutput:
        result = super()._run(step)
        logprobs = {index: TokenLogprobs(token, -1.5, 2) for index, token in enumerate(result.token_ids)}
        return StepOutput(result.token_ids, logprobs, result.prompt_logprobs)


def outputs_of(runner: SimulatedRunner, *requests: Request, **settings: object) -> list[TokenOutput]:
    engine = make_engine(runner, token_budget=8, max_sequences=4, **settings)
    for asked in requests:
        engine.add(asked)
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def test_logprobs_are_reported_with_their_tokens() -> None:
    for output in outputs_of(WithLogprobs(16, 4), request(logprobs=0)):
        assert output.logprobs == [TokenLogprobs(output.token_ids[0], -1.5, 2)]


def test_prompt_logprobs_are_reported_once_before_the_first_token() -> None:
    asked = request(prompt=20, prompt_logprobs=0)
    outputs = outputs_of(SimulatedRunner(16, 4), asked)
    rows = [row for output in outputs for row in output.prompt_logprobs or ()]
    assert [row.token_id for row in rows] == asked.prompt_token_ids[1:]
    assert [row.logprob for row in rows] == solo_prompt_logprobs(asked)
    assert [len(output.token_ids) for output in outputs] == [0, 0, 1, 1, 1]


def test_a_recomputed_prompt_does_not_report_its_logprobs_twice() -> None:
    others, asked = request("old", prompt=8, max_tokens=16), request("new", prompt=12, max_tokens=10, prompt_logprobs=0)
    runner = SimulatedRunner(6, 4)
    outputs = outputs_of(runner, others, asked)
    assert sum(len(step.new_rows) for step in runner.steps) > 2, "no sequence was preempted"
    rows = [row.token_id for o in outputs if o.request_id == "new" for row in o.prompt_logprobs or ()]
    assert rows == asked.prompt_token_ids[1:]


def test_cached_tokens_are_reported_with_the_first_output_and_counted() -> None:
    engine = make_engine(SimulatedRunner(16, 4), token_budget=16, max_sequences=4)
    cached, hits, queries = [], 0, 0
    for name in ("a", "b"):
        engine.add(request(name))
        while engine.has_work:
            report = engine.step()
            cached += [output.cached_tokens for output in report.outputs]
            hits += report.step.prefix_cache_hit_tokens
            queries += report.step.prefix_cache_query_tokens
    assert cached == [0, None, None, 8, None, None]
    assert (hits, queries) == (8, 20)


@pytest.mark.parametrize(
    ("asked", "prefix_caching", "counted"),
    [
        (request(), True, 10),
        (request(), False, 0),
        (request(prompt_logprobs=0), True, 0),
        (replace(request(), pooling=Pooling(method="mean")), True, 0),
        (replace(request(), pooling=Pooling(method="last")), True, 10),
        (replace(request(), pooling=Pooling(method="logprobs", token_ids=(1, 2))), True, 10),
    ],
)
def test_only_prompts_that_are_looked_up_in_the_prefix_cache_count_as_queries(
    asked: Request, *, prefix_caching: bool, counted: int
) -> None:
    sequence = Sequence(asked, ordinal=0, arrival=0.0, seed=0)
    if not prefix_caching:
        sequence.cache_salt = None
    plan = StepPlan((Chunk(sequence, 0, 10),))
    assert StepStats.of(plan, 1.0).prefix_cache_query_tokens == counted


def test_without_prefix_caching_no_tokens_are_cached() -> None:
    outputs = outputs_of(SimulatedRunner(64, 4), request("a"), request("b"), prefix_caching=False)
    assert [output.cached_tokens for output in outputs if output.cached_tokens is not None] == [0, 0]


def test_a_deadline_ends_a_request_between_steps_and_keeps_its_tokens() -> None:
    runner = SimulatedRunner(16, 4, base=1.0)
    outputs = outputs_of(runner, request(deadline=3.5, max_tokens=20))
    assert outputs[-1].finish_reason == FinishReason.DEADLINE
    assert outputs[-1].token_ids == []
    assert 1 <= sum(len(output.token_ids) for output in outputs) < 20


def test_no_step_runs_when_all_requests_are_overdue() -> None:
    runner = SimulatedRunner(16, 4)
    engine = make_engine(runner, token_budget=8, max_sequences=4)
    engine.add(request(deadline=0.5))
    runner.clock.now = 1.0
    report = engine.step()
    assert [output.finish_reason for output in report.outputs] == [FinishReason.DEADLINE]
    assert report.num_finished == 1
    assert not runner.steps
    assert not engine.cancel("a")


def chunks_of(prompt: int, budget: int, **settings: object) -> list[int]:
    """Tokens of each step that computes the prompt."""
    runner = SimulatedRunner(200, 4)
    engine = make_engine(runner, token_budget=budget, max_sequences=4, **settings)
    engine.add(request(prompt=prompt))
    while engine.has_work:
        engine.step()
    return [step.num_tokens for step in runner.steps][: -(-prompt // budget)]


def test_chunking_even_and_greedy_split_prompts_differently() -> None:
    assert EngineConfig(model="").chunking == "even"
    assert chunks_of(300, 200, chunking="even") == [150, 150]
    assert chunks_of(300, 200, chunking="greedy") == [200, 100]


@pytest.mark.parametrize(("target", "most"), [("off", 200), (40, 40)])
def test_the_inter_token_target_bounds_steps_with_decodes(target: object, most: int) -> None:
    """A step of the simulated device takes one millisecond per token here."""
    runner = SimulatedRunner(400, 4, base=0.0, token=0.001, kv_token=0.0)
    engine = make_engine(runner, token_budget=200, max_sequences=4, inter_token_target=target)
    engine.add(request("decoding", max_tokens=60))
    for _ in range(40):
        engine.step()
    engine.add(request("long", prompt=600))
    sizes = []
    while engine.has_work:
        engine.step()
        if runner.steps[-1].num_decodes:
            sizes.append(runner.steps[-1].num_tokens)
    assert 0.7 * most < max(sizes) <= 1.3 * most


@pytest.mark.parametrize(("seconds_per_block", "swaps"), [(0.0, True), (1e6, False)])
def test_the_cost_of_copying_a_block_decides_how_sequences_are_preempted(seconds_per_block: float, swaps: bool) -> None:
    runner = SimulatedRunner(6, 4, num_host_blocks=6, seconds_per_block=seconds_per_block)
    engine = make_engine(runner, token_budget=8, max_sequences=4, preemption="auto")
    for prompt in (1, 3, 8, 16, 5, 12):  # fits the step model
        engine.add(request("before", prompt=prompt))
        while engine.has_work:
            engine.step()
    engine.add(request("old", prompt=8, max_tokens=16))
    engine.add(request("new", prompt=12, max_tokens=10))
    preempted = swapped = 0
    while engine.has_work:
        stats = engine.step().step
        preempted, swapped = preempted + stats.preemptions, swapped + stats.swapped_out
    assert preempted > 0
    assert (swapped > 0) == swaps


def test_reports_count_prefill_and_decode_tokens_and_queue_time_once() -> None:
    runner = SimulatedRunner(16, 4)
    engine = make_engine(runner, token_budget=8, max_sequences=4)
    engine.add(request(prompt=10, max_tokens=3))
    runner.clock.now = 0.25
    steps = []
    while engine.has_work:
        steps.append(engine.step().step)
    assert [step.prefill_tokens for step in steps] == [8, 2, 0, 0]
    assert [step.decode_tokens for step in steps] == [0, 0, 1, 1]
    assert [step.queue_seconds for step in steps] == [[0.25], [], [], []]
    assert [step.step_seconds for step in steps] == pytest.approx(
        [runner.seconds(8, 8), *[runner.seconds(tokens, kv) for tokens, kv in ((2, 10), (1, 11), (1, 12))]]
    )
    assert engine.report([]).step.step_seconds == 0.0


def test_reports_carry_the_fit_of_step_times() -> None:
    runner = SimulatedRunner(64, 4)
    engine = make_engine(runner, token_budget=64, max_sequences=4)
    for number in range(12):
        engine.add(request(str(number), prompt=20 + number, max_tokens=20))
    while engine.has_work:
        report = engine.step()
    for tokens, kv_tokens in ((4, 100), (64, 200)):
        assert report.step_model.seconds(StepWork(tokens, kv_tokens)) == pytest.approx(
            runner.seconds(tokens, kv_tokens), rel=0.02
        )


@dataclass
class Anything:
    """A grammar that allows every token and never ends."""

    accepted: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    is_pending: bool = False

    def fill_mask(self, mask: memoryview) -> None:
        """Leave the mask unchanged."""

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_grammar_sees_each_generated_token_once() -> None:
    constraint = Anything()
    runner = SimulatedRunner(16, 4)
    engine = make_engine(runner, token_budget=8, max_sequences=4)
    engine._grammars = Given(constraint)
    engine.add(request(grammar=Grammar(kind="json_object")))
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert constraint.accepted == tokens


@dataclass
class Compiling(Given):
    """Grammars that are compiled when the test says so."""

    futures: list[Future[Callable[[], Constraint]]] = field(default_factory=list)

    def compile(self, _grammar: Grammar) -> Future[Callable[[], Constraint]]:
        self.futures.append(Future())
        return self.futures[-1]


def compiling_engine() -> tuple[Engine, Compiling]:
    """Return an engine with a request whose grammar is being compiled."""
    engine = make_engine(SimulatedRunner(16, 4), token_budget=8, max_sequences=4)
    engine._grammars = grammars = Compiling()
    engine.add(request("structured", max_tokens=3, grammar=Grammar(kind="json_object"), deadline=50.0))
    return engine, grammars


def finish_reasons(engine: Engine, steps: int = 100) -> dict[str, FinishReason]:
    """Run steps while there is work, and return the finish reasons by request."""
    found = {}
    for _ in range(steps):
        if not engine.has_work:
            break
        found |= {output.request_id: output.finish_reason for output in engine.step().outputs if output.finish_reason}
    return found


def test_a_grammar_that_is_being_compiled_delays_no_other_request() -> None:
    engine, grammars = compiling_engine()
    engine.add(request("free", max_tokens=3))
    assert finish_reasons(engine, 4) == {"free": FinishReason.LENGTH}
    state = engine.report([]).scheduler
    assert (state.num_waiting, state.num_running, state.backlog_prompt_tokens) == (1, 0, 10)
    grammars.futures[0].set_result(Anything)
    assert finish_reasons(engine) == {"structured": FinishReason.LENGTH}
    engine.check_integrity()


def test_a_request_whose_grammar_cannot_be_compiled_ends_alone() -> None:
    engine, grammars = compiling_engine()
    engine.add(request("free", max_tokens=3))
    grammars.futures[0].set_exception(RequestError("nothing can match it", "grammar"))
    assert finish_reasons(engine) == {"structured": FinishReason.GRAMMAR, "free": FinishReason.LENGTH}
    engine.check_integrity()


def test_a_request_can_be_cancelled_while_its_grammar_is_being_compiled() -> None:
    engine, grammars = compiling_engine()
    assert engine.cancel("structured")
    assert not engine.has_work
    grammars.futures[0].set_result(Anything)
    engine.check_integrity()


def test_a_deadline_passes_while_the_grammar_is_being_compiled() -> None:
    engine, _ = compiling_engine()
    assert finish_reasons(engine, 1) == {}
    engine._clock.now = 51.0  # type: ignore[attr-defined]
    assert finish_reasons(engine) == {"structured": FinishReason.DEADLINE}
    assert not engine.has_work
    engine.check_integrity()


def test_an_engine_without_grammars_rejects_them() -> None:
    engine = make_engine(SimulatedRunner(16, 4), token_budget=8, max_sequences=4)
    with pytest.raises(RequestError, match="no grammars") as error:
        engine.add(request(grammar=Grammar(kind="json_object")))
    assert error.value.param == "grammar"
    assert not engine.has_work


@dataclass
class Counting:
    """A grammar that allows the token that equals the number of tokens before it, and records when it is asked."""

    accepted: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    is_pending: bool = False

    def fill_mask(self, mask: memoryview) -> None:
        self.asked.append(len(self.accepted))
        mask[0] = 1

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_a_mask_is_computed_after_the_token_before_it_is_known(steps_in_flight: int) -> None:
    constraint = Counting()
    runner = SimulatedRunner(16, 4, steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=8, max_sequences=4)
    engine._grammars = Given(constraint)
    engine.add(request(max_tokens=6, grammar=Grammar(kind="json_object")))
    engine.add(request("free", max_tokens=6))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine._in_flight))
    assert most == 1, "a step is launched ahead although a grammar holds its sampling back"
    assert constraint.asked == [0, 1, 2, 3, 4, 5]


def test_a_mask_is_computed_while_the_step_runs() -> None:
    order: list[str] = []

    class Noted(Anything):
        def fill_mask(self, mask: memoryview) -> None:
            super().fill_mask(mask)
            order.append("mask")

    class NotedRunner(SimulatedRunner):
        def launch(self, step: StepInput) -> SimulatedTicket:
            order.append("launch")
            return super().launch(step)

        def run_until(self, ticket: SimulatedTicket) -> None:
            order.append("wait")
            super().run_until(ticket)

    engine = make_engine(NotedRunner(16, 4), token_budget=16, max_sequences=4)
    engine._grammars = Given(Noted())
    engine.add(request(prompt=8, max_tokens=3, grammar=Grammar(kind="json_object")))
    while engine.has_work:
        engine.step()
    assert order == ["launch", "mask", "wait"] * 3


@dataclass
class Ending:
    """A grammar that allows one token, and ends after `length` tokens of any kind."""

    allowed: int
    length: int
    accepted: list[int] = field(default_factory=list)
    is_pending: bool = False

    @property
    def end(self) -> FinishReason | None:
        return FinishReason.STOP if len(self.accepted) == self.length else None

    def fill_mask(self, mask: memoryview) -> None:
        assert self.end is None, "a mask is computed for a match that has ended"
        mask[0] = 1 << self.allowed

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@dataclass
class RecordingMasks(SimulatedRunner):
    """A device that records the first word of each mask of each step."""

    masks: list[list[int]] = field(default_factory=list)

    def run_until(self, ticket: SimulatedTicket) -> None:
        assert ticket.masks is not None
        self.masks.append([int(mask[0]) for mask in ticket.masks])
        super().run_until(ticket)


def test_a_sequence_that_ended_while_its_step_was_in_flight_leaves_the_masks_of_others() -> None:
    runner = RecordingMasks(16, 4, steps_in_flight=2)
    engine = make_engine(runner, token_budget=32, max_sequences=4)
    engine._grammars = Given(Ending(3, length=2), Ending(5, length=4))
    for name in ("first", "second"):
        engine.add(request(name, prompt=3, max_tokens=9, grammar=Grammar(kind="json_object")))
    while engine.has_work:
        engine.step()
    both, any_token = [1 << 3, 1 << 5], 0xFFFFFFFF
    assert runner.masks == [both, both, [any_token, 1 << 5], [1 << 5], [any_token]]


def test_reports_have_a_trace_only_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SimulatedRunner(16, 4), token_budget=8, max_sequences=1)
    engine.add(request("a", prompt=10))
    engine.add(request("b", prompt=5))
    engine.is_watched = True
    first, second = engine.step().trace, engine.step().trace
    assert first is not None
    assert second is not None
    assert (first.decodes, first.prompts, first.queue, first.blocks) == ([], [("a", 8)], [("b", 5)], [("a", 2)])
    assert second.prompts == [("a", 2)]
    third = engine.step().trace
    assert third is not None
    assert (third.decodes, third.prompts) == (["a"], [])
    engine.is_watched = False
    monkeypatch.setattr(StepTrace, "of", None)  # calling it fails
    while engine.has_work:
        assert engine.step().trace is None
