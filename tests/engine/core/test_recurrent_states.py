"""Slots of recurrent states: snapshots for the prefix cache, and what holds a slot when."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.blocks.state_pool import StatePool
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_plan import StepPlan
from support.checking import check_recomputed_workloads
from support.scheduling import Arrivals, run, scheduler, serve
from support.simulation import SimulatedRunner
from support.workloads import Workload

BLOCK = 4


def hybrid(slots: int = 20, **options: int) -> Scheduler:
    return scheduler(block_size=BLOCK, state_slots=slots, budget=options.pop("budget", 64), **options)


def tokens(count: int, own: int = 0, shared: int = 0) -> list[int]:
    """Return a prompt whose first `shared` tokens are those of all others."""
    return [1] * shared + [10 + own] * (count - shared)


def test_a_prompt_starts_at_the_end_of_an_equal_one() -> None:
    s, arrive = hybrid(), Arrivals()
    assert [serve(s, arrive(tokens(19), 1, salt="")) for _ in range(2)] == [0, 16]


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute() -> None:
    s, arrive = hybrid(), Arrivals()
    assert [serve(s, arrive(tokens(16), 1, salt="")) for _ in range(2)] == [0, 12]


def test_a_common_beginning_is_found_from_the_third_prompt_on() -> None:
    s, arrive = hybrid(), Arrivals()
    cached = [serve(s, arrive(tokens(30, own=number, shared=17), 1, salt="")) for number in range(4)]
    assert cached == [0, 0, 16, 16]


def test_a_next_turn_starts_near_the_end_of_the_last_one() -> None:
    s, arrive = hybrid(), Arrivals()
    first = arrive(tokens(10), 20, salt="")
    serve(s, first)
    assert serve(s, arrive([*first.tokens, *tokens(5)], 1, salt="")) == 28, "29 tokens were computed"


def test_a_sequence_keeps_one_snapshot_of_its_prompt_and_one_of_its_generation() -> None:
    s, arrive = hybrid(budget=8), Arrivals()
    serve(s, arrive(tokens(30), 30, salt=""))
    assert s.pool.states.num_snapshots == 2


def test_without_a_slot_a_sequence_waits() -> None:
    s, arrive = hybrid(slots=3), Arrivals()
    for number in range(4):
        s.add(arrive(tokens(6, own=number), 3, salt=""))
    run(s)
    assert (len(s.running), len(s.waiting)) == (3, 1)
    while s.has_work:
        run(s)
        s.check_integrity()


def test_a_snapshot_leaves_with_its_block() -> None:
    pool, table, other = BlockPool(2, BLOCK, 3), list[int](), list[int]()
    pool.extend(table, BLOCK)
    pool.publish(table, [1] * BLOCK, "", 0, 1)
    (block,) = table
    pool.states.add_snapshot(block, pool.states.take())
    pool.release(table)
    pool.extend(other, BLOCK)
    assert pool.states.has_snapshot(block), "the other block was free"
    pool.extend(other, 2 * BLOCK)
    assert block in other
    assert not pool.states.has_snapshot(block)
    pool.check_integrity([other])


def test_slots_of_snapshots_are_taken_least_recently_used_first_and_not_those_that_are_read() -> None:
    pool = StatePool(4)
    for block in (10, 11, 12):
        pool.add_snapshot(block, pool.take())
    assert pool.pin(10) == 0
    assert pool.take() == 3
    assert [pool.take(), pool.take()] == [1, 2]
    assert pool.num_available == 0
    assert not pool.has_room(1, 10)
    pool.unpin()
    assert pool.take() == 0


def test_a_sequence_holds_its_slot_until_no_step_in_flight_computes_it() -> None:
    s, arrive, in_flight = hybrid(slots=3), Arrivals(), deque[StepPlan]()
    sequence = arrive(tokens(6), 9, salt="")
    s.add(sequence)
    for _ in range(2):
        plan = s.schedule()
        assert plan is not None
        in_flight.append(plan)
    s.cancel(sequence)
    while in_flight:
        s.check_integrity()
        assert sequence.state_slot is not None
        done = in_flight.popleft()
        s.settle(done, [7] * sum(done.samples))
    s.check_integrity()
    assert sequence.state_slot is None


@pytest.mark.slow
@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_every_completed_request_equals_its_solo_run(steps_in_flight: int) -> None:
    def make(rng: random.Random, workload: Workload) -> SimulatedRunner:
        slots = rng.choice((3, 4, 8, 50))
        return SimulatedRunner(workload.num_blocks, BLOCK, num_state_slots=slots, steps_in_flight=steps_in_flight)

    seeds = range(1000 * steps_in_flight, 1000 * steps_in_flight + 30)
    seen: Counter[str] = Counter()
    for outcome in check_recomputed_workloads(make, seeds, BLOCK):
        seen["recomputed"] += outcome.preemptions > 0
        seen["started from a snapshot"] += sum(outcome.cached_tokens.values()) > 0
        seen["cancelled"] += bool(outcome.cancelled)
    for what in ("recomputed", "started from a snapshot", "cancelled"):
        assert seen[what] >= 3, f"only {seen[what]} of the workloads: {what}"
