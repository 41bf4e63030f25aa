"""Whatever arrives and whenever it is cancelled, on whatever cache and budget: these hold after every pass."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fastgen.engine import Engine
from support.simulation import Arrival, Outcome, SimulatedRunner, Step, make_engine, next_token, simulate

BLOCK = 4

arrival_lists = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 60),
        prompt=st.one_of(st.integers(1, 12), st.integers(1, 120)),
        generate=st.integers(1, 30),
        cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 25)),
        ignore_eos=st.booleans(),
    ),
    min_size=1,
    max_size=24,
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Arrival], int, int, int]:
    """Arrivals, token budget, most sequences, blocks: from a cache that barely holds the longest to an ample one."""
    arrivals = draw(arrival_lists)
    longest = max(a.prompt + a.generate for a in arrivals)
    least_blocks = -(-longest // BLOCK)
    num_blocks = draw(st.one_of(st.just(least_blocks), st.integers(least_blocks, least_blocks * 8)))
    max_sequences = draw(st.integers(1, 16))
    token_budget = draw(st.integers(max_sequences, 96))
    return arrivals, token_budget, max_sequences, num_blocks


def check_step(engine: Engine, step: Step, token_budget: int) -> None:
    scheduler = engine._scheduler
    pass_ = step.pass_
    scheduled = {chunk.sequence.id: chunk for chunk in pass_.chunks}
    preempted = {sequence.id for sequence in pass_.preempted}
    scheduler.check_integrity()  # blocks are conserved, among other things
    assert pass_.num_tokens <= token_budget, "the budget was exceeded"
    assert len(scheduled) == len(pass_.chunks), "a sequence is in the pass twice"
    for request_id in step.decoding:
        assert request_id in scheduled or request_id in preempted, "a decode was left out"
        if request_id in scheduled:
            assert scheduled[request_id].num_tokens == 1
    assert step.decoding <= scheduled.keys() or not scheduled.keys() & set(step.waiting), (
        "somebody was admitted in a pass in which a decode lost its blocks"
    )
    oldest = (*step.running, *step.waiting)[0]
    assert oldest in scheduled, "the oldest request did not get on"
    if pass_.preempted:
        assert [s.id for s in scheduler.waiting][: len(preempted)] == [s.id for s in reversed(pass_.preempted)]
        assert step.running[-len(preempted) :] == tuple(s.id for s in reversed(pass_.preempted)), (
            "somebody other than the newest was preempted"
        )
    multi = [chunk.num_tokens > 1 for chunk in pass_.chunks]
    assert multi == sorted(multi), "single tokens come first"


def expected_output(arrival: Arrival, number: int) -> list[int]:
    """What the request gives when it is alone on an endless device."""
    tokens = list(arrival.request(number).prompt_token_ids)
    generated: list[int] = []
    while len(generated) < arrival.generate:
        generated.append(next_token(tokens + generated))
        if generated[-1] == 0 and not arrival.ignore_eos:
            break
    return generated


def check_outcome(outcome: Outcome, arrivals: list[Arrival], runner: SimulatedRunner, engine: Engine) -> None:
    for number, arrival in enumerate(arrivals):
        request_id = str(number)
        expected = expected_output(arrival, number)
        if request_id in outcome.cancelled:
            assert request_id not in outcome.finished
            assert outcome.outputs[request_id] == expected[: len(outcome.outputs[request_id])]
        else:
            assert outcome.outputs[request_id] == expected, "batching, chunking or preemption changed the output"
            ended_by_stop = expected[-1] == 0 and not arrival.ignore_eos
            assert outcome.finished[request_id] == ("stop" if ended_by_stop else "length")
    assert engine._scheduler.pool.num_free == runner.num_blocks
    assert not engine.has_work


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads())
def test_every_workload_keeps_the_invariants_and_ends_with_the_right_tokens(
    workload: tuple[list[Arrival], int, int, int],
) -> None:
    arrivals, token_budget, max_sequences, num_blocks = workload
    runner = SimulatedRunner(num_blocks, BLOCK)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=max_sequences)
    outcome = simulate(engine, runner, arrivals, lambda e, step: check_step(e, step, token_budget))
    check_outcome(outcome, arrivals, runner, engine)
    event(f"preempted: {outcome.preemptions > 0}")
    event(f"cancelled: {bool(outcome.cancelled)}")
    event(f"split: {any(c.num_tokens > 1 and not c.samples for p in runner.passes for c in p.chunks)}")


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(arrival_lists, st.integers(1, 16), st.integers(0, 80))
def test_with_memory_to_spare_no_pass_leaves_budget_unused_while_prompts_wait(
    arrivals: list[Arrival], max_sequences: int, spare_budget: int
) -> None:
    token_budget = max_sequences + spare_budget
    runner = SimulatedRunner(10_000, BLOCK)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=max_sequences)

    def full(_: Engine, step: Step) -> None:
        left_behind = [c for c in step.pass_.chunks if not c.samples]
        not_admitted = set(step.waiting) - {c.sequence.id for c in step.pass_.chunks}
        slots_left = max_sequences - len(step.running) - len(set(step.waiting) - not_admitted)
        if left_behind or (not_admitted and slots_left):
            assert step.pass_.num_tokens == token_budget
        assert len(left_behind) <= 1, "two prompts are half in the cache at once"

    outcome = simulate(engine, runner, arrivals, full)
    assert outcome.preemptions == 0
    check_outcome(outcome, arrivals, runner, engine)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 400),
    st.integers(12, 64),
    st.integers(0, 12),
)
def test_a_long_prompt_never_delays_running_decodes_beyond_one_pass(
    decoders: int, long_prompt: int, token_budget: int, arrives_at: int
) -> None:
    arrivals = [Arrival(step=0, prompt=2, generate=40) for _ in range(decoders)]
    arrivals.append(Arrival(step=arrives_at, prompt=long_prompt, generate=3))
    runner = SimulatedRunner(1000, BLOCK)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=12)
    worst_pass = runner.base + runner.token * token_budget + runner.kv_token * 1000 * BLOCK
    gaps: list[float] = []
    last: dict[str, float] = {}

    def note(_: Engine, step: Step) -> None:
        for chunk in step.pass_.chunks:
            if chunk.samples:
                now, request_id = runner.clock.now, chunk.sequence.id
                if request_id in last:
                    gaps.append(now - last[request_id])
                last[request_id] = now

    outcome = simulate(engine, runner, arrivals, note)
    assert len(outcome.finished) == len(arrivals)
    assert gaps
    assert max(gaps) <= worst_pass + 1e-9, "a decode waited for a prompt"


def test_memory_pressure_really_preempts() -> None:
    arrivals = [Arrival(step=0, prompt=20, generate=40) for _ in range(6)]
    runner = SimulatedRunner(num_blocks=24, block_size=BLOCK)
    engine = make_engine(runner, token_budget=32, max_sequences=6)
    outcome = simulate(engine, runner, arrivals, lambda e, step: check_step(e, step, 32))
    assert outcome.preemptions > 0
    check_outcome(outcome, arrivals, runner, engine)


@pytest.mark.parametrize("token_budget", [8, 32, 128])
def test_preemption_does_not_turn_into_recomputing_for_ever(token_budget: int) -> None:
    """Recomputed tokens stay below the tokens that had to be computed anyway."""
    arrivals = [Arrival(step=0, prompt=40, generate=60) for _ in range(8)]
    runner = SimulatedRunner(num_blocks=100, block_size=BLOCK)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=8)
    outcome = simulate(engine, runner, arrivals, lambda e, step: check_step(e, step, token_budget))
    needed = sum(a.prompt + a.generate - 1 for a in arrivals)
    computed = sum(p.num_tokens for p in runner.passes)
    assert outcome.preemptions > 0
    assert computed - needed < needed
