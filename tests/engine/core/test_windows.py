"""Blocks of layers with a sliding window: freed as the window moves, found by prefix, and never short of a window."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.blocks.window_pool import LEFT, WindowGroup, WindowPool, most_held
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_plan import StepPlan
from support.checking import check_outcome, check_recomputed_workloads, check_step
from support.scheduling import Arrivals, run, run_to_end, scheduler, serve, sizes
from support.simulation import SimulatedRunner, make_engine
from support.workloads import Arrival, Workload, play, random_window

BLOCK = 4


def windowed(window: int, blocks: int, *, budget: int = 64, **options: int) -> tuple[Scheduler, WindowPool]:
    s = scheduler(block_size=BLOCK, budget=budget, window_group=WindowGroup(window, blocks), **options)
    assert s.pool.window is not None
    return s, s.pool.window


def tokens(count: int, *, shared: int = 0, own: int = 0) -> list[int]:
    """Return a prompt whose first `shared` tokens are those of all others."""
    return [1 + place for place in range(shared)] + [1000 * own + 500 + place for place in range(count - shared)]


@pytest.mark.parametrize("salt", ["", None])
@pytest.mark.parametrize("window", [1, 4, 5, 7, 8, 9])
def test_a_generation_of_any_length_holds_its_window_and_a_block_at_each_end(window: int, salt: str | None) -> None:
    s, pool = windowed(window, 100)
    sequence = Arrivals()(tokens(6), 200, salt=salt)
    s.add(sequence)
    most = 0
    while s.has_work:
        run(s)
        most = max(most, pool.num_blocks - pool.num_free)
    assert most <= most_held(window, BLOCK)
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("salt", ["", None])
def test_the_least_blocks_are_enough_for_a_sequence_of_any_length(salt: str | None) -> None:
    s, pool = windowed(9, most_held(9, BLOCK), budget=50)
    sequence = Arrivals()(tokens(150), 150, salt=salt)
    s.add(sequence)
    assert sizes(run(s)) == {"0": pool.num_blocks * BLOCK}, "a chunk has no more tokens than there are blocks for"
    while s.has_work:
        assert not run(s).preempted


def test_a_prompt_leaves_the_blocks_before_its_window_when_its_chunk_is_computed() -> None:
    s, _ = windowed(8, 100, budget=30)
    sequence = Arrivals()(tokens(60), 2, salt="")
    s.add(sequence)
    plan = s.schedule()
    assert plan is not None
    assert LEFT not in sequence.window_table, "all tokens of a chunk are read by those after them"
    s.settle(plan, [])
    # 30 tokens are computed, 28 in full blocks. The 29th reads from the 22nd on.
    assert sequence.window_table[:6] == [LEFT] * 5 + sequence.window_table[5:6]
    assert LEFT not in sequence.window_table[5:]
    s.check_integrity()
    run_to_end(s)


def test_a_step_in_flight_keeps_the_blocks_that_it_reads() -> None:
    s, _ = windowed(8, 100, budget=16)
    sequence = Arrivals()(tokens(48), 2, salt="")
    s.add(sequence)
    in_flight = deque[StepPlan]()
    for start in (0, 16, 32):
        plan = s.schedule()
        assert plan is not None
        in_flight.append(plan)
        first = max(0, start - 8 + 1) // BLOCK
        assert LEFT not in sequence.window_table[first:]
        if len(in_flight) == 2:
            s.settle(in_flight.popleft(), [])
            s.check_integrity()
            first_unsettled = in_flight[0].starts[0]
            assert LEFT not in sequence.window_table[(first_unsettled - 8 + 1) // BLOCK :]
    while in_flight:
        plan = in_flight.popleft()
        s.settle(plan, [7] * sum(plan.samples))
    run_to_end(s)


def test_a_repeated_prompt_is_found_by_the_blocks_of_its_last_window() -> None:
    s, _ = windowed(8, 100)
    arrive = Arrivals()
    assert [serve(s, arrive(tokens(42), 1, salt="")) for _ in range(2)] == [0, 40]


def test_a_prefix_without_the_blocks_of_its_last_window_is_shortened_to_one_with_them() -> None:
    s, pool = windowed(8, 8)
    arrive = Arrivals()
    serve(s, arrive(tokens(22), 1, salt=""))
    # Five full blocks and one more. Another prompt evicts the blocks that were left first.
    serve(s, arrive(tokens(14, own=1), 1, salt=""))
    again = arrive(tokens(22), 1, salt="")
    assert serve(s, again) == 20
    serve(s, arrive(tokens(28, own=2), 1, salt=""))
    assert pool.num_free == pool.num_blocks
    again = arrive(tokens(22), 1, salt="")
    assert serve(s, again) == 0, "the other layers still have all its blocks"


def test_a_prompt_that_ends_within_the_common_tokens_is_not_continued_where_the_window_has_moved_on() -> None:
    """The blocks before the last window are only reused for others when there are no free ones."""
    s, pool = windowed(4, 6)
    arrive = Arrivals()
    serve(s, arrive(tokens(64, shared=64), 1, salt=""))
    shorter = arrive([*tokens(22, shared=22), 7, 7], 1, salt="")
    assert serve(s, shorter) < 20
    assert pool.num_free == pool.num_blocks


def test_a_block_that_leaves_the_prefix_cache_leaves_that_of_the_windows_too() -> None:
    pool = BlockPool(2, BLOCK, window_group=WindowGroup(8, 4))
    assert pool.window is not None
    table, window_table, other = list[int](), list[int](), list[int]()
    pool.extend(table, BLOCK)
    pool.window.extend(window_table, 1)
    pool.publish(table, [1] * BLOCK, "", 0, 1)
    pool.window.publish(table[0], window_table[0])
    places = list(table)
    pool.release(table)
    pool.window.release(window_table)
    assert pool.window.usable(places) == 1
    pool.extend(other, 2 * BLOCK)
    assert pool.window.usable(places) == 0
    pool.check_integrity([other])


def test_cached_blocks_of_windows_are_evicted_least_recently_used_first() -> None:
    pool = WindowPool(WindowGroup(4, 3), BLOCK)
    table: list[int] = []
    pool.extend(table, 3)
    for place, block in zip((10, 11, 12), table, strict=True):
        pool.publish(place, block)
    pool.leave(table, 0, 2)
    assert table[:2] == [LEFT, LEFT]
    taken: list[int] = []
    pool.extend(taken, 1)
    assert [pool.usable([place]) for place in (10, 11, 12)] == [0, 1, 1]
    pool.release(taken)
    pool.release(table)
    pool.check_integrity([], {10, 11, 12}.__contains__)


def test_too_few_blocks_of_windows_preempt_the_lowest_ranked_sequence() -> None:
    s, pool = windowed(8, 8, sequences=4)
    arrive = Arrivals()
    for number in range(3):
        s.add(arrive(tokens(9, own=number), 40, salt=""))
    preempted: list[str] = []
    while s.has_work:
        preempted += [sequence.id for sequence in run(s).preempted]
    assert preempted
    assert set(preempted) == {"2"}
    assert s.pool.num_blocks > 10 * pool.num_blocks, "the other layers have enough"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("token_budget", [8, 32, 128])
def test_too_few_blocks_of_windows_do_not_cause_endless_recomputation(token_budget: int, steps_in_flight: int) -> None:
    """Fewer tokens are recomputed than have to be computed anyway."""
    arrivals = [Arrival(step=0, prompt=40, generate=60) for _ in range(8)]
    runner = SimulatedRunner(1000, BLOCK, window_group=WindowGroup(8, 16), steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=token_budget, max_sequences=8)
    outcome = play(engine, arrivals, lambda e, step: check_step(e, step, token_budget))
    check_outcome(outcome, arrivals, engine)
    needed = sum(a.prompt + a.generate - 1 for a in arrivals)
    assert sum(step.num_tokens for step in runner.steps) < 2 * needed


def test_a_request_that_waits_for_prompt_logprobs_computes_all_tokens() -> None:
    s, _ = windowed(8, 50)
    arrive = Arrivals()
    serve(s, arrive(tokens(30), 1, salt=""))
    assert serve(s, arrive(tokens(30), 1, salt="", prompt_logprobs=0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_every_completed_request_equals_its_solo_run(steps_in_flight: int) -> None:
    def make(rng: random.Random, workload: Workload) -> SimulatedRunner:
        group = random_window(rng, BLOCK)
        return SimulatedRunner(workload.num_blocks, BLOCK, window_group=group, steps_in_flight=steps_in_flight)

    seeds = range(1000 * steps_in_flight, 1000 * steps_in_flight + 30)
    seen: Counter[str] = Counter()
    for outcome in check_recomputed_workloads(make, seeds, BLOCK):
        seen["preempted"] += outcome.preemptions > 0
        seen["found in the cache"] += sum(outcome.cached_tokens.values()) > 0
        seen["cancelled"] += bool(outcome.cancelled)
    for what in ("preempted", "found in the cache", "cancelled"):
        assert seen[what] >= 3, f"only {seen[what]} of the workloads: {what}"
