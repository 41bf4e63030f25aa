"""Properties that hold after every step, for any arrivals, cancellations, cache sizes and budgets."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fastgen.core.blocks.window_pool import WindowGroup, most_held
from fastgen.engine.core import Engine
from support.checking import check_outcome, check_step
from support.simulation import SimulatedRunner, make_engine
from support.workloads import Arrival, Step, play, repeated

BLOCK = 4
MOST_ARRIVALS, LONGEST_PROMPT, LONGEST_OUTPUT = 24, 120, 30
AMPLE = MOST_ARRIVALS * (LONGEST_PROMPT + LONGEST_OUTPUT + BLOCK) // BLOCK  # blocks

single_arrivals = st.builds(
    Arrival,
    step=st.integers(0, 60),
    prompt=st.one_of(st.integers(1, 12), st.integers(1, LONGEST_PROMPT)),
    generate=st.integers(1, LONGEST_OUTPUT),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 25)),
    ignore_eos=st.booleans(),
    family=st.integers(0, 2),
)
repeated_arrivals = st.builds(repeated, single_arrivals, st.lists(st.integers(0, 25), min_size=1, max_size=3))
arrival_lists = st.lists(
    st.one_of(single_arrivals.map(lambda arrival: [arrival]), repeated_arrivals), min_size=1, max_size=MOST_ARRIVALS
).map(lambda groups: list(chain.from_iterable(groups))[:MOST_ARRIVALS])


@st.composite
def window_groups(draw: st.DrawFn) -> WindowGroup:
    """A window, and at least the blocks that a sequence needs for it."""
    window = draw(st.integers(1, 24))
    least = most_held(window, BLOCK)
    return WindowGroup(window, draw(st.one_of(st.just(least), st.integers(least, 8 * least))))


windows = st.one_of(st.none(), window_groups())


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Arrival], int, int, int]:
    """Arrivals, token budget, max sequences, blocks; the cache at least holds the longest request."""
    arrivals = draw(arrival_lists)
    longest = max(a.prompt + a.generate for a in arrivals)
    least_blocks = -(-longest // BLOCK)
    num_blocks = draw(st.one_of(st.just(least_blocks), st.integers(least_blocks, least_blocks * 8)))
    max_sequences = draw(st.integers(1, 16))
    token_budget = draw(st.integers(max_sequences, 96))
    return arrivals, token_budget, max_sequences, num_blocks


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads(), st.integers(1, 2), st.one_of(st.just(0), st.integers(3, 8), st.just(100)), windows)
def test_every_workload_keeps_the_invariants_and_generates_the_right_tokens(
    workload: tuple[list[Arrival], int, int, int],
    steps_in_flight: int,
    num_state_slots: int,
    window_group: WindowGroup | None,
) -> None:
    arrivals, token_budget, max_sequences, num_blocks = workload
    if window_group is not None:
        num_state_slots = 0  # no model has both
    runner = SimulatedRunner(
        num_blocks,
        BLOCK,
        num_state_slots=num_state_slots,
        window_group=window_group,
        steps_in_flight=steps_in_flight,
    )
    engine = make_engine(runner, token_budget=token_budget, max_sequences=max_sequences)
    outcome = play(engine, arrivals, lambda e, step: check_step(e, step, token_budget))
    check_outcome(outcome, arrivals, engine)
    event(f"preempted: {outcome.preemptions > 0}")
    event(f"started from a snapshot: {num_state_slots > 0 and sum(outcome.cached_tokens.values()) > 0}")
    event(f"continued in a window: {window_group is not None and sum(outcome.cached_tokens.values()) > 0}")
    event(f"cancelled: {bool(outcome.cancelled)}")
    event(f"split: {any(c.num_tokens > 1 and not c.samples for s in outcome.steps for c in s.plan.chunks)}")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(arrival_lists, st.integers(1, 16), st.integers(0, 80), st.integers(1, 2))
def test_with_ample_memory_no_step_leaves_budget_unused_while_prompts_wait(
    arrivals: list[Arrival], max_sequences: int, spare_budget: int, steps_in_flight: int
) -> None:
    token_budget = max_sequences + spare_budget
    runner = SimulatedRunner(AMPLE, BLOCK, steps_in_flight=steps_in_flight)
    # With the prefix cache, a prompt waits for a block that another one computes.
    engine = make_engine(runner, token_budget=token_budget, max_sequences=max_sequences, prefix_caching=False)

    def full(_: Engine, step: Step) -> None:
        left_behind = [c for c in step.plan.chunks if not c.samples]
        not_admitted = set(step.waiting) - {c.sequence.id for c in step.plan.chunks}
        slots_left = max_sequences - step.num_held - len(set(step.waiting) - not_admitted)
        if left_behind or (not_admitted and slots_left):
            assert step.plan.num_tokens == token_budget
        assert len(left_behind) <= 2, "besides the first prompt, more than one is split"

    outcome = play(engine, arrivals, full)
    assert outcome.preemptions == 0
    check_outcome(outcome, arrivals, engine)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 400),
    st.integers(12, 64),
    st.integers(0, 12),
    st.integers(1, 2),
    st.sampled_from([0, 2]),
)
def test_a_long_prompt_delays_running_decodes_by_at_most_one_step(
    decoders: int, long_prompt: int, token_budget: int, arrives_at: int, steps_in_flight: int, shared: int
) -> None:
    arrivals = [Arrival(step=0, prompt=2, generate=40, shared=shared) for _ in range(decoders)]
    arrivals.append(Arrival(step=arrives_at, prompt=long_prompt, generate=3))
    runner = SimulatedRunner(1000, BLOCK, steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=12)
    longest_step = runner.base + runner.token * token_budget + runner.kv_token * 1000 * BLOCK
    outcome = play(engine, arrivals, lambda _engine, _step: None)
    assert len(outcome.finished) == len(arrivals)
    gaps: list[float] = []
    last: dict[str, float] = {}
    for step, done_at in zip(outcome.steps, runner.done_at, strict=True):
        for chunk in step.plan.chunks:
            if chunk.samples:
                if chunk.sequence.id in last:
                    gaps.append(done_at - last[chunk.sequence.id])
                last[chunk.sequence.id] = done_at
    assert gaps
    assert max(gaps) <= longest_step + 1e-9, "a decode waited for a prompt"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_memory_pressure_preempts(steps_in_flight: int) -> None:
    arrivals = [Arrival(step=0, prompt=20, generate=40) for _ in range(6)]
    runner = SimulatedRunner(num_blocks=24, block_size=BLOCK, steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=32, max_sequences=6)
    outcome = play(engine, arrivals, lambda e, step: check_step(e, step, 32))
    assert outcome.preemptions > 0
    check_outcome(outcome, arrivals, engine)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("token_budget", [8, 32, 128])
def test_preemption_does_not_cause_endless_recomputation(token_budget: int, steps_in_flight: int) -> None:
    """Fewer tokens are recomputed than have to be computed anyway."""
    arrivals = [Arrival(step=0, prompt=40, generate=60) for _ in range(8)]
    runner = SimulatedRunner(num_blocks=100, block_size=BLOCK, steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=8)
    outcome = play(engine, arrivals, lambda e, step: check_step(e, step, token_budget))
    needed = sum(a.prompt + a.generate - 1 for a in arrivals)
    computed = sum(step.num_tokens for step in runner.steps)
    assert outcome.preemptions > 0
    assert computed - needed < needed
