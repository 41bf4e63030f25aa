"""Prompt tokens per step, and the step model that bounds them."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen.core.chunking import (
    MIN_PROMPT_TOKENS,
    ROW_MULTIPLE,
    Allowance,
    AutomaticTarget,
    Chunker,
    FixedTarget,
    StepLoad,
    Target,
    even_share,
    whole_tiles,
)
from fastgen.core.step_model import StepModel, non_negative_least_squares
from fastgen.core.step_times import StepCoefficients, StepTime, StepWork, chunk_seconds, chunk_tokens
from support.scheduling import Arrivals, Known, run, scheduler, sizes


def observed(
    base: float, token: float, kv_token: float = 0.0, context_pair: float = 0.0, *, steps: int = 400, noise: float = 0.0
) -> StepModel:
    """A model of steps of all sizes, with decodes and a chunk, whose times have these coefficients, plus noise.

    The chunk has a context only if `context_pair` is not 0.
    """
    rng, model, costs = random.Random(3), StepModel(), StepCoefficients(base, token, kv_token, context_pair)
    for _ in range(steps):
        decodes = StepWork(7, rng.randrange(20_000))
        chunk = StepWork.of_chunk(rng.randrange(20_000) if context_pair else 0, rng.choice((1, 53, 121, 249)))
        work = StepWork(*map(sum, zip(decodes, chunk, strict=True)))
        model.observe(work, costs.seconds(work) * (1 + noise * rng.random()))
    return model


@given(st.integers(1, 10_000), st.integers(1, 600))
def test_even_steps_are_as_few_as_full_ones_and_differ_by_at_most_one_token(backlog: int, room: int) -> None:
    sizes_, left = [], backlog
    while left:
        sizes_.append(min(left, even_share(left, room)))
        left -= sizes_[-1]
    assert len(sizes_) == -(-backlog // room)
    assert max(sizes_) - min(sizes_) <= 1
    assert max(sizes_) <= room


def test_even_chunking_halves_a_prompt_that_greedy_splits_unevenly() -> None:
    for chunking, expected in (("greedy", [16, 4]), ("even", [10, 10])):
        s = scheduler(budget=16, chunker=Chunker(chunking, Target()))  # type: ignore[arg-type]
        s.add(Arrivals()(prompt=20))
        assert [run(s).num_tokens for _ in range(2)] == expected


def test_a_fixed_target_bounds_only_steps_with_decodes() -> None:
    target = FixedTarget(0.1, observed(0.05, 0.001))
    s, arrive = scheduler(budget=256, chunker=Chunker("greedy", target)), Arrivals()
    s.add(arrive(prompt=300))
    assert sizes(run(s)) == {"0": 256}
    run(s)
    s.add(arrive(prompt=300))
    assert 48 <= run(s).num_tokens <= 50


def test_prompts_advance_even_if_the_target_cannot_be_met() -> None:
    chunker = Chunker("greedy", FixedTarget(0.001, observed(0.05, 0.001)))
    assert chunker.allowance(256, StepLoad(decodes=8, kv_tokens=0, backlog=1000)).tokens == MIN_PROMPT_TOKENS


@given(st.integers(1, 200), st.integers(1, 600), st.integers(1, 2000), st.floats(0.001, 0.5))
def test_a_bounded_step_fills_whole_tiles_of_rows(decodes: int, room: int, backlog: int, seconds: float) -> None:
    """Unless the token budget or the end of the backlog bounds it, or its prompts would hardly advance."""
    target = FixedTarget(seconds, observed(0.02, 0.001))
    bound = target.allowance(load := StepLoad(decodes, 0, backlog)).tokens
    for chunking in ("greedy", "even"):
        tokens = min(Chunker(chunking, target).allowance(room, load).tokens, backlog)  # type: ignore[arg-type]
        assert 1 <= tokens <= min(room, backlog)
        if bound >= min(room, backlog):
            continue
        assert tokens <= bound
        if MIN_PROMPT_TOKENS + ROW_MULTIPLE <= tokens < min(room, backlog):
            assert (decodes + tokens) % ROW_MULTIPLE == 0


def test_an_automatic_bound_moves_to_the_nearest_whole_tile_and_a_fixed_one_down() -> None:
    prompts = (17, 29, 30, 31, 45, 46, 100)
    times, load = observed(0.04, 0.001), StepLoad(decodes=10, kv_tokens=0, backlog=1000)
    nearest, down = (
        [whole_tiles(10, count, target.allowance(load).excess) for count in prompts]
        for target in (AutomaticTarget(times), FixedTarget(0.1, times))
    )
    assert nearest == [22, 22, 22, 38, 38, 38, 102]
    assert down == [17, 22, 22, 22, 38, 38, 86]
    assert whole_tiles(8, MIN_PROMPT_TOKENS, 0) == MIN_PROMPT_TOKENS, "prompts still advance"


def test_even_steps_with_decodes_fill_whole_tiles_before_the_last() -> None:
    chunker = Chunker("even", FixedTarget(0.1, observed(0.02, 0.001)))
    backlog, parts = 200, []
    while backlog:
        parts.append(min(backlog, chunker.allowance(512, StepLoad(decodes=8, kv_tokens=0, backlog=backlog)).tokens))
        backlog -= parts[-1]
    assert parts == [72, 72, 56]


def test_the_automatic_target_is_five_times_the_fixed_cost_of_a_step() -> None:
    target = AutomaticTarget(observed(0.04, 0.001))
    assert target.allowance(StepLoad(decodes=8, kv_tokens=0, backlog=100)).tokens == pytest.approx(4 * 40 - 8, abs=3)


def test_over_a_context_the_automatic_target_is_twelve_times_the_fixed_cost_of_a_step() -> None:
    target = AutomaticTarget(Known(costs := StepCoefficients(0.04, 0.001, 1e-6, 4e-7)))
    allowed = target.allowance(load := StepLoad(decodes=8, kv_tokens=2000, backlog=100))
    assert allowed.decode_seconds + allowed.seconds == pytest.approx(12 * (0.04 + 0.002))
    at_the_start = costs.seconds(load.decode_work) + chunk_seconds(costs, 0, allowed.tokens)
    assert at_the_start == pytest.approx(5 * (0.04 + 0.002), abs=0.001)
    assert allowed.tokens_in_time(1000, 0) > allowed.tokens > allowed.tokens_in_time(10_000, 0)


def test_the_automatic_target_follows_demand_and_yields_to_a_backlog() -> None:
    target = AutomaticTarget(observed(0.04, 0.001))
    assert target.allowance(StepLoad(8, 0, backlog=64 * 200)).tokens == 200
    for _ in range(500):
        target.observe(160)
    assert target.allowance(StepLoad(8, 0, backlog=100)).tokens == pytest.approx(240, abs=2)


def test_without_decodes_only_the_token_budget_bounds_a_step() -> None:
    chunker = Chunker("greedy", FixedTarget(0.001, observed(0.05, 0.001)))
    assert chunker.allowance(256, StepLoad(decodes=0, kv_tokens=0, backlog=1000)) == Allowance(256)


def test_the_step_model_recovers_the_coefficients() -> None:
    for exact in ((0.04, 0.001, 2e-6, 0.0), (0.04, 0.001, 2e-6, 3e-7), (0.005, 2.5e-5, 1e-8, 1.3e-9)):
        assert observed(*exact).coefficients == pytest.approx(exact, rel=0.01, abs=1e-12)


def test_the_step_model_is_robust_to_noise_and_outliers() -> None:
    model = observed(0.04, 0.001, 2e-6, steps=800, noise=0.1)
    for _ in range(3):
        model.observe(StepWork(128, 1000), 30.0)
    assert model.coefficients.seconds(StepWork(256, 10_000)) == pytest.approx(0.04 + 0.256 + 0.02, rel=0.15)
    assert model.coefficients.seconds(StepWork(8, 0)) == pytest.approx(0.048, rel=0.15)


def test_long_decoding_does_not_wash_out_the_times_of_large_steps() -> None:
    model = observed(0.04, 0.001)
    for _ in range(5000):
        model.observe(StepWork(8, 4000), 0.048)
    assert model.coefficients.seconds(StepWork(256, 4000)) == pytest.approx(0.296, rel=0.02)


def test_the_step_model_adapts_to_a_slower_machine() -> None:
    model = observed(0.04, 0.001)
    rng = random.Random(5)
    for _ in range(1500):
        tokens = rng.choice((8, 60, 128, 256))
        model.observe(StepWork(tokens), 2 * (0.04 + 0.001 * tokens))
    assert model.coefficients.seconds(StepWork(128, 0)) == pytest.approx(2 * 0.168, rel=0.05)


def observe_short_prompts(model: StepModel, costs: StepCoefficients, saved: float = 0.0) -> None:
    """Add 4000 steps with noise, whose rows are padded to tiles, of prompts of less than 300 tokens.

    `saved`: share of the time of its tokens that a step of 256 tokens saves, and a smaller one less.
    """
    rng = random.Random(4)
    for _ in range(4000):
        decodes = rng.randrange(12)
        tokens = rng.choice((16, 40, 64, 100, 128, 200, 248))
        chunk = StepWork.of_chunk(max(0, rng.randrange(-150, 300 - tokens)), tokens)
        work = StepWork(decodes + chunk.tokens, decodes * 200 + chunk.kv_tokens, chunk.context_pairs)
        rows = -(-work.tokens // ROW_MULTIPLE) * ROW_MULTIPLE
        seconds = costs.seconds(work) + costs.token * (rows * (1 - saved * rows / 256) - work.tokens)
        model.observe(work, seconds * (1 + 0.1 * abs(rng.gauss(0, 1))))


def of_long_context(model: StepModel, costs: StepCoefficients, tokens: int, slow: float = 1.0) -> float:
    """Observe a chunk at a context of 20,000 beside 8 decodes; return its predicted time over the real one."""
    chunk = StepWork.of_chunk(20_000, tokens)
    work = chunk._replace(tokens=tokens + 8, kv_tokens=chunk.kv_tokens + 2400)
    predicted, seconds = model.coefficients.seconds(work), costs.seconds(work)
    model.observe(work, slow * seconds)
    return predicted / seconds


@pytest.mark.parametrize("slow", [1.0, 4.0, 30.0], ids=["as usual", "slow", "very slow"])
def test_the_first_steps_of_a_long_context_are_fitted_at_once(slow: float) -> None:
    """Also if the very first one was slow for another reason."""
    costs = StepCoefficients(0.02, 0.0006, 2e-7, 7e-7)
    model = observed(0.02, 0.0006, 2e-7, noise=0.1)
    assert of_long_context(model, costs, 256, slow) < 0.1
    for _ in range(4):
        of_long_context(model, costs, 64)
    for tokens in (8, 32, 128):
        assert of_long_context(model, costs, tokens) == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("slow", [3.0, 30.0])
def test_a_slow_step_does_not_change_a_fit_that_has_seen_its_like(slow: float) -> None:
    costs = StepCoefficients(0.02, 0.0006, 2e-7, 7e-7)
    model = observed(*costs, noise=0.1)
    before = [of_long_context(model, costs, tokens) for tokens in (1, 16, 64, 256)]
    for tokens in (16, 256):
        of_long_context(model, costs, tokens, slow)
    model._fit()
    assert [of_long_context(model, costs, tokens) for tokens in (1, 16, 64, 256)] == pytest.approx(before, rel=0.05)


def test_what_the_model_cannot_explain_is_not_fitted_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    model = observed(0.02, 0.0006, 2e-7, noise=0.1)
    monkeypatch.setattr(model, "_fit", lambda: fits.append(model._num_observed))
    for number in range(400):
        model.observe(StepWork(100 + number % 7), 10.0 if number % 2 else 1e-3)
    assert len(fits) <= 400 // 16 + 16


@pytest.mark.parametrize("saved", [0.0, 0.15], ids=["linear", "concave"])
def test_short_contexts_invent_no_cost_of_contexts(saved: float) -> None:
    costs, model = StepCoefficients(0.04, 0.001, 1e-6), StepModel()
    observe_short_prompts(model, costs, saved)
    for context in (300, 1000, 3000):
        assert chunk_seconds(model.coefficients, context, 128) < 1.3 * chunk_seconds(costs, context, 128)


@pytest.mark.parametrize("points", [1, 20], ids=["calibrated", "seen once"])
def test_short_contexts_do_not_wash_out_the_cost_of_long_ones(points: int) -> None:
    costs = StepCoefficients(0.04, 0.001, 1e-6, 7e-7)
    chunks = [StepWork.of_chunk(context, size) for context in (0, 1024, 4096) for size in (16, 64)]
    works = [StepWork(4, 8), StepWork(4, 1000), *chunks, *map(StepWork, (16, 32, 64, 128, 256))]
    calibrated = [StepTime(work, costs.seconds(work)) for work in works]
    model = StepModel.of(calibrated)
    if points > 1:  # without a prior
        model = StepModel()
        for point in calibrated * points:
            model.observe(*point)
    assert model.coefficients.context_pair == pytest.approx(7e-7, rel=0.05)
    observe_short_prompts(model, costs)
    assert model.coefficients.context_pair == pytest.approx(7e-7, rel=0.35)


def test_coefficients_are_never_negative() -> None:
    model = StepModel.of(StepTime(StepWork(size), 0.1 / size) for size in (8, 16, 32, 64) * 5)  # the larger, the faster
    assert min(model.coefficients) >= 0
    assert chunk_tokens(model.coefficients, 0.0, 0) == 0 or model.coefficients.token == 0


def test_an_unfitted_step_model_bounds_nothing() -> None:
    assert chunk_tokens(StepModel().coefficients, 0.1, 0) == sys.maxsize
    assert StepModel().coefficients.seconds(StepWork(100, 100, 100)) == 0


def test_steps_of_one_size_predict_other_sizes_in_proportion() -> None:
    model = StepModel.of(StepTime(StepWork(256), 0.3) for _ in range(20))
    assert chunk_tokens(model.coefficients, 0.1, 0) == pytest.approx(85, abs=1)


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 4), min_size=3, max_size=6), st.lists(st.floats(-3, 3), min_size=6))
def test_non_negative_least_squares_finds_the_minimum(rows: list[tuple[float, ...]], ys: list[float]) -> None:
    xx = [sum(r[i] * r[j] for r in rows) + (i == j) * 0.1 for i in range(4) for j in range(4)]
    xy = [sum(r[i] * y for r, y in zip(rows, ys, strict=False)) for i in range(4)]

    def objective(x: Sequence[float]) -> float:
        return sum(x[i] * xx[4 * i + j] * x[j] for i in range(4) for j in range(4)) - 2 * sum(
            xy[i] * x[i] for i in range(4)
        )

    best = non_negative_least_squares(xx, xy)
    assert min(best) >= 0
    for i in range(4):
        for step in (-1e-3, 1e-3, 0.1, 1.0):
            other = [max(0.0, best[k] + step * (k == i)) for k in range(4)]
            assert objective(best) <= objective(other) + 1e-7
