"""How prompts share a step: half of it for the first one, the rest for the shortest."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlan
from support.scheduling import Arrivals, run, scheduler, sizes

relaxed = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_a_short_prompt_behind_a_long_one_is_computed_in_the_next_step() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=100))
    run(s)
    s.add(arrive(prompt=4))
    assert sizes(run(s)) == {"0": 12, "1": 4}


def test_the_first_prompt_gets_half_of_a_step_however_many_short_ones_arrive() -> None:
    s, arrive = scheduler(budget=16, sequences=16), Arrivals()
    s.add(arrive(prompt=100))
    for _ in range(8):
        s.add(arrive(prompt=4))
    assert sizes(run(s)) == {"0": 8, "1": 4, "2": 4}


def test_prompts_of_equal_length_are_computed_by_arrival() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    for _ in range(3):
        s.add(arrive(prompt=24))
    assert [sizes(run(s)) for _ in range(2)] == [{"0": 16}, {"0": 8, "1": 8}]


def test_the_prompt_with_the_fewest_tokens_left_goes_first_even_if_it_is_in_progress() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=100))
    s.add(arrive(prompt=12))
    assert sizes(run(s)) == {"0": 8, "1": 8}
    s.add(arrive(prompt=5))
    assert sizes(run(s)) == {"0": 8, "1": 4, "2": 4}


def test_a_short_prompt_of_a_lower_priority_waits_for_a_long_one() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=40))
    s.add(arrive(prompt=4, priority=1))
    assert [sizes(run(s)) for _ in range(2)] == [{"0": 16}, {"0": 16}]
    assert sizes(run(s)) == {"0": 8, "1": 4}


def test_no_prompt_overtakes_a_first_one_that_does_not_fit_yet() -> None:
    s, arrive = scheduler(budget=32, blocks=7, block_size=4), Arrivals()
    s.add(arrive(prompt=8, generate=20))
    s.add(arrive(prompt=16, generate=4))
    run(s)
    assert [preempted.id for preempted in run(s).preempted] == ["1"]
    s.add(arrive(prompt=1, generate=1))
    assert s.pool.num_free == 4, "room for the new prompt, not for all 17 tokens of the preempted one"
    assert sizes(run(s)) == {"0": 1}


def test_a_prompt_overtakes_only_if_it_leaves_the_blocks_that_longer_ones_need() -> None:
    # The first prompt needs 10 blocks in all, the one that overtakes 2. One more is for growth.
    for blocks, overtakes in ((12, False), (13, True)):
        s, arrive = scheduler(budget=16, blocks=blocks, block_size=4), Arrivals()
        s.add(arrive(prompt=40, generate=1))
        run(s)
        s.add(arrive(prompt=44, generate=1))
        s.add(arrive(prompt=8, generate=1))
        assert ("2" in sizes(run(s))) == overtakes


def plans(s: Scheduler, in_flight: deque[StepPlan], ahead: int) -> StepPlan | None:
    """Schedule a step while up to `ahead` earlier ones run, and return it."""
    plan = s.schedule()
    if plan is not None:
        in_flight.append(plan)
    if in_flight and (plan is None or len(in_flight) > ahead):
        done = in_flight.popleft()
        s.settle(done, [7] * sum(done.samples))
    s.check_integrity()
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
@relaxed
@given(
    budget=st.integers(12, 48),
    longs=st.lists(st.integers(60, 400), min_size=1, max_size=3),
    shorts=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=8),
    generate=st.integers(1, 4),
)
def test_long_prompts_are_not_starved_by_an_endless_stream_of_short_ones(
    ahead: int, budget: int, longs: list[int], shorts: list[list[int]], generate: int
) -> None:
    """Each is done in twice the steps it takes alone, after the ones before it and the wait for a place to run."""
    s, arrive, in_flight = (
        scheduler(budget=budget, sequences=8, blocks=120, block_size=16),
        Arrivals(),
        deque[StepPlan](),
    )
    prompts = [arrive(prompt=length, generate=1) for length in longs]
    for prompt in prompts:
        s.add(prompt)
    least = budget - 7  # beside the decodes of all others
    bound = sum(2 * -(-length // least) + generate + ahead + 2 for length in longs)
    for step in range(bound):
        for length in shorts[step % len(shorts)]:
            s.add(arrive(prompt=length, generate=generate))
        plans(s, in_flight, ahead)
    assert all(prompt.num_computed_tokens >= prompt.num_prompt_tokens for prompt in prompts)


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
@relaxed
@given(
    budget=st.integers(4, 40),
    waves=st.lists(st.lists(st.tuples(st.integers(1, 120), st.sampled_from([0, 0, 1])), max_size=5), max_size=12),
)
def test_half_of_every_step_goes_to_the_first_prompt_and_the_rest_to_the_shortest(
    ahead: int, budget: int, waves: list[list[tuple[int, int]]]
) -> None:
    s, arrive, in_flight = (
        scheduler(budget=budget, sequences=4, blocks=60, block_size=16),
        Arrivals(),
        deque[StepPlan](),
    )
    for wave in waves + [[]] * 60:
        for length, priority in wave:
            s.add(arrive(prompt=length, generate=2, priority=priority))
        if not s.has_work:
            break
        waiting = set(s.waiting)
        # The last token of a prompt is scheduled like a decode.
        before = {x: x.num_pending_tokens for x in (*s.running, *waiting) if x in waiting or x.num_pending_tokens > 1}
        plan = plans(s, in_flight, ahead)
        if plan is not None:
            check_shares(before, waiting, plan)


def first_of(prompts: set[Sequence], priority: int) -> Sequence | None:
    """Return the first prompt of a priority."""
    return min((p for p in prompts if p.priority == priority), key=lambda prompt: prompt.rank, default=None)


def check_shares(before: dict[Sequence, int], waiting: set[Sequence], plan: StepPlan) -> None:
    """Check a step by the pending tokens of all prompts before it."""
    given = {chunk.sequence: chunk.num_tokens for chunk in plan.chunks if chunk.sequence in before}
    left = {prompt: size - given.get(prompt, 0) for prompt, size in before.items() if size > given.get(prompt, 0)}
    if not given:
        return
    admitted = waiting & given.keys()
    first = min(before, key=lambda prompt: prompt.rank)
    if first in waiting - admitted:  # there is no place to run
        assert not admitted, "the first prompt was overtaken"
        first = min(before.keys() - waiting, key=lambda prompt: prompt.rank)
    share = -(-sum(given.values()) // 2)
    assert given.get(first, 0) >= min(before[first], share), "the first prompt got less than its share"
    for prompt in left:
        for other in given.keys() - {first_of(before.keys() - set(waiting - admitted), prompt.priority), prompt}:
            if prompt in waiting - admitted and other not in admitted:
                continue  # it may lack a place to run
            assert other.priority <= prompt.priority, "a lower priority was preferred"
            longer = before[other] > before[prompt] and prompt is not first
            assert other.priority < prompt.priority or not longer, "a longer prompt was preferred"
