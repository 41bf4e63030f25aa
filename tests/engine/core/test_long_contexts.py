"""The cost of chunks over a context, and steps that stay within their time over long contexts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.core.chunking import MIN_PROMPT_TOKENS, ROW_MULTIPLE, Allowance, AutomaticTarget, Chunker, FixedTarget
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.core.step_times import StepCoefficients, StepWork, chunk_seconds, chunk_tokens
from support.scheduling import Arrivals, run, scheduler
from support.simulation import SimulatedRunner, make_engine

coefficients = st.builds(
    StepCoefficients,
    base=st.floats(0, 0.1),
    token=st.floats(1e-6, 1e-2),
    kv_token=st.sampled_from([0.0]) | st.floats(1e-10, 1e-5),
    context_pair=st.sampled_from([0.0]) | st.floats(1e-11, 1e-6),
)


@dataclass(frozen=True)
class Known:
    """Step times that need no fit."""

    coefficients: StepCoefficients


@given(coefficients, st.integers(0, 200_000), st.integers(1, 5000))
def test_a_chunk_adds_the_time_of_its_work(costs: StepCoefficients, start: int, tokens: int) -> None:
    step = costs.seconds(StepWork.of_chunk(start, tokens))
    assert costs.base + chunk_seconds(costs, start, tokens) == pytest.approx(step)
    assert chunk_seconds(costs, start, 0) == 0


@given(coefficients, st.integers(0, 200_000), st.floats(-0.1, 10.0))
def test_the_longest_chunk_fits_and_one_more_token_would_not(
    costs: StepCoefficients, start: int, seconds: float
) -> None:
    tokens = chunk_tokens(costs, seconds, start)
    rounding = 1e-5 * (chunk_seconds(costs, start, 2) - chunk_seconds(costs, start, 1))
    if tokens:
        assert chunk_seconds(costs, start, tokens) <= seconds + rounding
    assert chunk_seconds(costs, start, tokens + 1) > seconds - rounding


@given(coefficients, st.integers(0, 200_000), st.floats(0.0, 10.0), st.integers(1, 3000))
def test_a_chunk_that_grows_in_two_parts_takes_the_same_time_as_at_once(
    costs: StepCoefficients, start: int, seconds: float, part: int
) -> None:
    allowed = Allowance(10**9, seconds, costs)
    whole = allowed.tokens_in_time(start, 0)
    if whole > part:
        assert allowed.without(start, 0, part).tokens_in_time(start, part) == pytest.approx(whole - part, abs=1)


def test_nothing_bounds_a_chunk_while_its_cost_or_the_time_is_unknown() -> None:
    assert chunk_tokens(StepCoefficients(), 0.0, 1000) == sys.maxsize
    assert Allowance(16).tokens_in_time(1000, 5) > 10**9


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=6))
def test_the_work_of_a_plan_is_that_of_its_chunks(chunks: list[tuple[int, int]]) -> None:
    made = []
    for number, (start, tokens) in enumerate(chunks):
        request = Request(id=str(number), prompt_token_ids=[1] * 100, sampling=SamplingParams(max_tokens=1))
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.num_computed_tokens = start
        made.append(Chunk(sequence, start, tokens))
    parts = (StepWork.of_chunk(*chunk) for chunk in chunks)
    assert StepPlan(tuple(made)).work == StepWork(*map(sum, zip(*parts, strict=True)))


def play(s: Scheduler, prompts: list[int], steps: int, arrive: Arrivals | None = None) -> list[StepPlan]:
    """Return the plans of steps with two decodes and these prompts."""
    arrive = arrive or Arrivals()
    for prompt in (1, 1, *prompts):
        s.add(arrive(prompt=prompt, generate=10_000))
    return [run(s) for _ in range(steps)]


@settings(max_examples=60, deadline=None)
@given(coefficients, st.floats(0.01, 0.5), st.lists(st.integers(1, 3000), min_size=1, max_size=4))
def test_planned_steps_stay_within_the_target_over_any_context(
    costs: StepCoefficients, target: float, prompts: list[int]
) -> None:
    """Except that in each step some prompt advances, and the time of 16 tokens without a context is always allowed.

    A token that takes more than half of the time leaves half of it to the other prompts.
    """
    s = scheduler(
        blocks=400, block_size=64, budget=512, sequences=8, chunker=Chunker("greedy", FixedTarget(target, Known(costs)))
    )
    for plan in play(s, prompts, 25)[1:]:
        decodes = [chunk for chunk in plan.chunks if chunk.samples and chunk.num_tokens == 1]
        chunks = [chunk for chunk in plan.chunks if not (chunk.samples and chunk.num_tokens == 1)]
        if not chunks:
            continue
        without = costs.base + sum(chunk_seconds(costs, chunk.start, 1) for chunk in decodes)
        seconds = sum(chunk_seconds(costs, chunk.start, chunk.num_tokens) for chunk in chunks)
        assert without + seconds == pytest.approx(costs.seconds(plan.work))
        allowed = max(target - without, chunk_seconds(costs, 0, MIN_PROMPT_TOKENS))
        limit = max(allowed, allowed / 2 + max(chunk_seconds(costs, chunk.start, 1) for chunk in chunks))
        assert seconds <= limit * (1 + 1e-5)
        if plan.num_tokens < 512 and len(chunks) == 1 and not chunks[0].samples:
            more = chunk_seconds(costs, chunks[0].start, chunks[0].num_tokens + ROW_MULTIPLE)
            assert more > allowed * (1 - 1e-5), "another tile of rows would fit"


@pytest.mark.parametrize("target", [FixedTarget, AutomaticTarget])
def test_chunks_shrink_while_the_context_grows_and_end_at_whole_tiles(target: type) -> None:
    times = Known(StepCoefficients(0.02, 0.0005, 1e-7, 1e-7))
    made = AutomaticTarget(times) if target is AutomaticTarget else FixedTarget(0.1, times)
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", made))
    sizes = [plan.num_tokens for plan in play(s, [8000], 100)[1:] if plan.num_tokens > 3]
    assert sizes[0] == 144
    assert all(after <= before for before, after in pairwise(sizes[:-1]))
    assert sizes[-2] < 80
    assert {size % ROW_MULTIPLE for size in sizes[:-1]} == {0}


def test_a_prompt_advances_a_token_a_step_where_not_even_one_fits() -> None:
    times = Known(StepCoefficients(0.05, 0.001, 1e-4, 1e-3))
    s = scheduler(
        blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", FixedTarget(0.001, times))
    )
    first, *others = play(s, [1000], 20)
    assert first.num_tokens > 200, "nothing decodes yet"
    assert [plan.num_tokens for plan in others] == [3] * 19


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The first prompt gets half of the time, not half of the tokens that would fit without a context."""
    times = Known(StepCoefficients(0.02, 0.0005, 0.0, 1e-6))
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", FixedTarget(0.1, times)))
    play(s, [8000], 60, arrive := Arrivals())
    short = arrive(prompt=50)
    s.add(short)
    plan = run(s)
    assert dict(zip(plan.sequences, plan.ends, strict=True))[short] == 50


def test_short_prompts_advance_beside_one_whose_tokens_do_not_fit() -> None:
    times = Known(StepCoefficients(0.05, 0.001, 1e-4, 0.0))
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", FixedTarget(0.04, times)))
    play(s, [1000], 20, arrive := Arrivals())
    s.add(short := arrive(prompt=50))
    for _ in range(15):
        run(s)
    assert short.is_decoding


def test_a_longer_prompt_advances_beside_one_with_fewer_tokens_left_that_do_not_fit() -> None:
    times = Known(StepCoefficients(0.05, 0.001, 0.0, 1e-4))
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", FixedTarget(0.04, times)))
    arrive = Arrivals()
    s.add(first := arrive(prompt=3000))
    for _ in range(3):
        run(s)
    play(s, [], 1, arrive)
    assert 0 < first.num_pending_tokens < 2500
    s.add(other := arrive(prompt=2500))
    computed = [(run(s), other.num_computed_tokens)[1] for _ in range(20)]
    assert not first.is_decoding
    assert all(later > before for before, later in pairwise(computed[2:]))


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_long_prompt_keeps_the_target_of_running_decodes(steps_in_flight: int) -> None:
    """The device's attention costs as much as the rest of a token at a context of 860 tokens."""
    target = 0.2
    runner = SimulatedRunner(
        6000, 16, base=0.02, token=0.0006, kv_token=2e-7, pair=7e-7, steps_in_flight=steps_in_flight
    )
    engine = make_engine(
        runner, token_budget=512, max_sequences=16, chunking="even", inter_token_target=200, prefix_caching=False
    )
    runner.pool = None  # its check of every block in every step takes long
    sampling = SamplingParams(max_tokens=5000, ignore_eos=True, temperature=0)
    for number in range(8):
        engine.add(Request(id=f"decoder {number}", prompt_token_ids=[1] * 64, sampling=sampling))
    while runner.clock.now < 3:
        engine.step()
    engine.add(Request(id="long", prompt_token_ids=[1] * 30_000, sampling=sampling))
    gaps, last, finished = list[float](), dict[str, float](), set[str]()
    while "long" not in finished:
        for output in engine.step().outputs:
            if output.request_id in last:
                gaps.append(runner.clock.now - last[output.request_id])
            last[output.request_id] = runner.clock.now
            finished.add(output.request_id)
    gaps.sort()
    assert len(gaps) > 8 * 1000
    assert gaps[len(gaps) * 99 // 100] <= 1.25 * target
