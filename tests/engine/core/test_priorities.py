"""Priorities and deadlines."""

from __future__ import annotations

import pytest

from support.scheduling import Arrivals, run, run_to_end, scheduler, sizes


def test_lower_priorities_are_admitted_first_and_ties_by_arrival() -> None:
    s, arrive = scheduler(sequences=2), Arrivals()
    for priority in (3, 1, 2, 1):
        s.add(arrive(prompt=2, priority=priority))
    assert list(sizes(run(s))) == ["1", "3"]
    assert [sequence.id for sequence in s.waiting] == ["2", "0"]


def test_a_higher_priority_prompt_goes_before_a_half_prefilled_one() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=40, priority=1))
    run(s)
    s.add(arrive(prompt=10))
    assert sizes(run(s)) == {"1": 10, "0": 6}


def test_a_lower_priority_prompt_goes_after_a_half_prefilled_one() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=24))
    run(s)
    s.add(arrive(prompt=10, priority=1))
    assert sizes(run(s)) == {"0": 8, "1": 8}


def test_a_higher_priority_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    s, arrive = scheduler(sequences=1), Arrivals()
    s.add(arrive(prompt=2, generate=3))
    run(s)
    s.add(arrive(prompt=2, priority=1))
    s.add(arrive(prompt=2, priority=-1))
    run(s)
    run(s)
    assert sizes(run(s)) == {"2": 2}


def test_the_oldest_waiting_request_is_reported_whatever_its_priority() -> None:
    s, arrive = scheduler(sequences=1), Arrivals()
    s.add(arrive(prompt=2, generate=9))
    run(s)
    s.add(arrive(prompt=2, priority=9))  # arrives at 2
    s.add(arrive(prompt=2))
    assert s.stats(now=10.0).oldest_waiting_seconds == 8.0


def test_admitted_requests_leave_every_order_of_the_queue() -> None:
    s, arrive = scheduler(sequences=2, budget=16), Arrivals()
    s.add(arrive(prompt=2, generate=2, priority=9))  # never admitted
    for _ in range(1000):
        s.add(arrive(prompt=2, generate=1))
        s.add(arrive(prompt=2, generate=1))
        run(s)
    assert len(s._waiting._by_arrival) == len(s.waiting) < 200
    assert s.stats(now=10.0).oldest_waiting_seconds == 9.0


@pytest.mark.parametrize("state", ["waiting", "half-prefilled", "decoding", "preempted"])
def test_a_deadline_ends_a_request_in_any_state(state: str) -> None:
    s, arrive = scheduler(blocks=4, block_size=4, budget=8, sequences=2), Arrivals()
    s.add(arrive(prompt=8, generate=8))
    run(s)
    prompt = {"waiting": 3, "half-prefilled": 12, "decoding": 3, "preempted": 7}[state]
    late = arrive(prompt=prompt, generate=4, deadline=5.0)  # it arrives at 2
    s.add(late)
    for _ in range({"waiting": 0, "half-prefilled": 1, "decoding": 1, "preempted": 6}[state]):
        run(s)
    assert s.end_overdue(6.9) == []
    assert s.end_overdue(7.0) == [late]
    assert late.finish_reason == "deadline"
    assert late not in s.running
    assert late not in s.waiting
    s.check_integrity()
    run_to_end(s)
    assert s.pool.num_free == 4


def test_the_deadline_of_a_finished_request_is_not_tracked() -> None:
    s, arrive = scheduler(), Arrivals()
    s.add(arrive(prompt=2, generate=1, deadline=5.0))
    run_to_end(s)
    assert s.end_overdue(100.0) == []
