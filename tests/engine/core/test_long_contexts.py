"""The cost of chunks over a context, and steps that stay within their time over long contexts."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.core.chunking import (
    LONGEST_MULTIPLE,
    MIN_PROMPT_TOKENS,
    ROW_MULTIPLE,
    Allowance,
    AutomaticTarget,
    Chunker,
    FixedTarget,
    StepLoad,
)
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.core.step_times import StepCoefficients, StepWork, chunk_seconds, chunk_tokens
from fastgen.engine.core import Engine
from support.scheduling import Arrivals, Known, run, scheduler
from support.simulation import SimulatedRunner, make_engine

coefficients = st.builds(
    StepCoefficients,
    base=st.floats(0, 0.1),
    token=st.floats(1e-6, 1e-2),
    kv_token=st.sampled_from([0.0]) | st.floats(1e-10, 1e-5),
    context_pair=st.sampled_from([0.0]) | st.floats(1e-11, 1e-6),
)


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
    """Except that the time of 16 tokens without a context is always allowed, and to the first prompt its least tokens.

    If these take more than half of the time, the other prompts have half of it nevertheless.
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
        least = Allowance(0, 0.0, costs, without).least_tokens
        most = max(chunk_seconds(costs, chunk.start, min(least(chunk.start), chunk.num_tokens)) for chunk in chunks)
        limit = max(allowed, allowed / 2 + most)
        assert seconds <= limit * (1 + 1e-5)
        if plan.num_tokens < 512 and len(chunks) == 1 and not chunks[0].samples:
            more = chunk_seconds(costs, chunks[0].start, chunks[0].num_tokens + ROW_MULTIPLE)
            assert more > allowed * (1 - 1e-5), "another tile of rows would fit"
            assert chunks[0].num_tokens >= least(chunks[0].start)


@pytest.mark.parametrize("target", [FixedTarget, AutomaticTarget])
def test_chunks_shrink_while_the_context_grows_and_end_at_whole_tiles(target: type) -> None:
    """Of the rows of the step, or of the chunk's own tokens where attention takes longer than all else."""
    times = Known(costs := StepCoefficients(0.02, 0.0005, 1e-7, 3e-7))
    made = AutomaticTarget(times) if target is AutomaticTarget else FixedTarget(0.1, times)
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", made))
    chunks = [plan.chunks[-1] for plan in play(s, [8000], 150)[1:] if plan.num_tokens > 3][:-1]
    if target is AutomaticTarget:
        assert {chunk.num_tokens for chunk in chunks if chunk.start < 2500} == {158}, "until they take too long"
        chunks = [chunk for chunk in chunks if chunk.start > 3200]
    products = [chunk.num_tokens for chunk in chunks if costs.context_pair * chunk.start <= costs.token]
    attention = [chunk.num_tokens for chunk in chunks[len(products) :]]
    assert {(tokens + 2) % ROW_MULTIPLE for tokens in products} <= {0}
    assert {tokens % ROW_MULTIPLE for tokens in attention} == {0}
    for sizes in (products, attention):
        assert all(after <= before for before, after in pairwise(sizes))
    assert attention[-1] < 0.7 * chunks[0].num_tokens


def test_an_automatic_target_is_exceeded_by_at_most_a_quarter_to_fill_a_tile() -> None:
    """Also where a tile takes as long as the whole step: with 16 more tokens it would take up to twice as long."""
    costs = StepCoefficients(0.02, 0.0005, 0.0, 1e-6)
    chunker = Chunker("even", AutomaticTarget(Known(costs)))
    s = scheduler(blocks=800, block_size=64, budget=256, sequences=8, chunker=chunker)
    plans = play(s, [30_000], 1500)[1:]
    sizes = {plan.num_tokens - 2 for plan in plans if plan.chunks[-1].start > 12_000}
    assert min(sizes) < 10 < max(sizes)
    assert max(costs.seconds(plan.work) for plan in plans) <= 1.25 * LONGEST_MULTIPLE * costs.base


@given(coefficients, st.integers(0, 200_000), st.integers(0, 200), st.integers(0, 100_000))
def test_the_least_tokens_are_16_or_as_many_as_double_the_time_of_a_step(
    costs: StepCoefficients, start: int, decodes: int, kv_tokens: int
) -> None:
    without = StepLoad(decodes, kv_tokens, backlog=1).decode_work
    least = Allowance(0, 0.0, costs, costs.seconds(without)).least_tokens(start)
    with_one, with_least, with_more = (
        costs.seconds(without) + chunk_seconds(costs, start, tokens) for tokens in (1, least, least + 1)
    )
    assert 1 <= least <= MIN_PROMPT_TOKENS
    assert with_least <= 2 * with_one * (1 + 1e-5)
    assert least == MIN_PROMPT_TOKENS or with_more > 2 * with_one * (1 - 1e-5)


@pytest.mark.parametrize("target", [FixedTarget, AutomaticTarget])
@pytest.mark.parametrize(
    ("costs", "tokens"),
    [
        (StepCoefficients(0.05, 0.001, 1e-3, 1e-6), 16),  # reading the KV takes longest, as on a GPU
        (StepCoefficients(0.05, 0.001, 2e-7, 2e-6), 16),  # 16 tokens take less than the rest of the step
        (StepCoefficients(0.05, 0.001, 1e-4, 1e-3), 1),  # two tokens would double the time of the step
    ],
)
def test_a_long_prompt_makes_progress_where_no_token_fits_in_the_time(
    target: type, costs: StepCoefficients, tokens: int
) -> None:
    times = Known(costs)
    made = FixedTarget(0.001, times) if target is FixedTarget else AutomaticTarget(Known(costs._replace(base=0.0)))
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", made))
    first, *others = play(s, [1000], 20)
    assert first.num_tokens > 200, "nothing decodes yet"
    if target is FixedTarget:
        assert [plan.num_tokens for plan in others] == [tokens + 2] * 19
    assert all(plan.num_tokens > 2 for plan in others)
    assert all(plan.num_decode_tokens == 2 for plan in others), "no decode is left out"


def test_a_step_is_bounded_while_the_only_decode_awaits_its_mask() -> None:
    times = Known(StepCoefficients(0.02, 0.0005, 0.0, 1e-6))
    s = scheduler(blocks=400, block_size=64, budget=256, sequences=8, chunker=Chunker("even", FixedTarget(0.1, times)))
    arrive = Arrivals()
    s.add(masked := arrive(prompt=1, generate=100))
    run(s)
    s.add(arrive(prompt=8000))
    bounded = run(s).num_tokens
    masked.lack_mask()
    assert run(s).num_tokens <= bounded
    masked.lacks_mask = False
    assert masked in run(s).sequences


def test_a_backlog_lets_no_step_take_longer_than_a_full_one_without_contexts() -> None:
    """With `auto`, prompts get the time of a 64th of the backlog. What one step has no room for does not count."""
    costs = StepCoefficients(0.01, 0.0005, 0.0, 1e-6)
    chunker = Chunker("even", AutomaticTarget(Known(costs)))
    s = scheduler(blocks=4000, block_size=64, budget=256, sequences=16, chunker=chunker)
    for plan in play(s, [20_000] * 8, 150)[80:]:
        assert costs.seconds(plan.work) <= 1.25 * costs.seconds(StepWork(256))


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


def engine_for_long_contexts(steps_in_flight: int, **settings: Any) -> tuple[SimulatedRunner, Engine]:
    """Return a device and an engine. Attention costs as much as the rest of a token at a context of 860 tokens."""
    runner = SimulatedRunner(
        6000, 16, base=0.02, token=0.0006, kv_token=2e-7, pair=7e-7, steps_in_flight=steps_in_flight
    )
    engine = make_engine(runner, max_sequences=16, chunking="even", **settings)
    runner.pool = None  # its check of every block in every step takes long
    return runner, engine


def add(engine: Engine, name: str, prompt: list[int], count: int = 1, max_tokens: int = 5000) -> None:
    """Add requests."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    for number in range(count):
        engine.add(Request(id=f"{name} {number}", prompt_token_ids=prompt, sampling=sampling))


def gaps_until_first_token(runner: SimulatedRunner, engine: Engine, name: str) -> list[float]:
    """Return the gaps of all requests until this one has its first token, in order of size."""
    gaps, last = list[float](), dict[str, float]()
    while name not in last:
        for output in engine.step().outputs:
            if output.request_id in last:
                gaps.append(runner.clock.now - last[output.request_id])
            last[output.request_id] = runner.clock.now
    return sorted(gaps)


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_long_prompt_keeps_the_target_of_running_decodes(steps_in_flight: int) -> None:
    runner, engine = engine_for_long_contexts(
        steps_in_flight, token_budget=512, inter_token_target=200, prefix_caching=False
    )
    add(engine, "decoder", [1] * 64, 8)
    while runner.clock.now < 3:
        engine.step()
    add(engine, "long", [1] * 30_000)
    gaps = gaps_until_first_token(runner, engine, "long 0")
    assert len(gaps) > 8 * 1000
    assert gaps[len(gaps) * 99 // 100] <= 1.25 * 0.2
    assert gaps[-1] <= 2 * 0.2


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(("target", "most"), [(200, 0.2), ("auto", LONGEST_MULTIPLE * 0.02)])
def test_a_context_that_few_steps_have_shown_keeps_the_target(
    target: int | str, most: float, steps_in_flight: int
) -> None:
    """A prompt alone is computed in a few full steps. The next one reads its KV from the prefix cache."""
    runner, engine = engine_for_long_contexts(steps_in_flight, token_budget=2048, inter_token_target=target)
    add(engine, "first", [3] * 64, 8, max_tokens=100)
    while engine.has_work:
        engine.step()
    add(engine, "prefix", [1] * 20_000, max_tokens=1)
    while engine.has_work:
        engine.step()
    add(engine, "decoder", [4] * 64, 8)
    for _ in range(3):
        engine.step()
    add(engine, "question", [1] * 20_000 + [2] * 3000)
    gaps = gaps_until_first_token(runner, engine, "question 0")
    assert len(gaps) > 8 * 50
    assert gaps[len(gaps) * 99 // 100] <= 1.25 * most


# The costs of SmolLM2-135M on two cores, with products in int8 and in bfloat16: see docs/decisions/068.
MEASURED = {
    "int8": {"base": 0.0075, "token": 0.000375, "kv_token": 7e-7, "pair": 3.85e-7, "query_tile": 16},
    "bfloat16": {
        **{"base": 0.0155, "token": 0.00058, "kv_token": 7e-7, "pair": 3.85e-7},
        **{"query_tile": 16, "row_tile": 16},
    },
}


def two_long_prompts_beside_streams(costs: dict[str, Any], target: str) -> tuple[float, float, float]:
    """Return the streams' median gap before the prompts and their p99 gap beside them, and the last first token."""
    runner = SimulatedRunner(2000, 64, steps_in_flight=1, eos_token_ids=frozenset(), **costs)
    engine = make_engine(
        runner, token_budget=256, max_sequences=16, chunking="even", inter_token_target=target, prefix_caching=False
    )
    runner.pool = None
    add(engine, "stream", [1] * 20, 8)
    while runner.clock.now < 3:
        engine.step()
    before = runner.done_at[-1] - runner.done_at[-2]
    began = runner.clock.now
    add(engine, "long", [2] * 6300, 2, max_tokens=1)
    gaps = gaps_until_first_token(runner, engine, "long 1")
    return before, gaps[len(gaps) * 99 // 100], runner.clock.now - began


@pytest.mark.slow
@pytest.mark.parametrize("products", MEASURED)
def test_by_default_streams_keep_15_times_their_gap_and_long_prompts_seven_eighths_of_the_rate(products: str) -> None:
    """Of their gap without the prompts, and of the rate with full steps."""
    before, gap, seconds = two_long_prompts_beside_streams(MEASURED[products], "auto")
    _, gap_of_full, seconds_of_full = two_long_prompts_beside_streams(MEASURED[products], "off")
    assert gap <= 15 * before
    assert gap <= gap_of_full / 2
    assert seconds_of_full >= 7 / 8 * seconds
