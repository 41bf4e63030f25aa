"""Steps that are scheduled before the results of earlier ones are known."""

from __future__ import annotations

import pytest

from fastgen.core.request import FinishReason
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import UNKNOWN
from fastgen.core.step_plan import StepPlan
from support.scheduling import Arrivals, scheduler


def scheduled(s: Scheduler) -> StepPlan:
    plan = s.schedule()
    assert plan is not None
    s.check_integrity()
    return plan


def settle(s: Scheduler, plan: StepPlan, token: int = 7) -> None:
    s.settle(plan, [token for chunk in plan.chunks if chunk.samples])
    s.check_integrity()


def test_the_next_step_computes_the_token_that_the_last_one_samples() -> None:
    s, arrive = scheduler(), Arrivals()
    sequence = arrive(prompt=3)
    s.add(sequence)
    first, second = scheduled(s), scheduled(s)
    (chunk,) = second.chunks
    assert (chunk.start, chunk.samples, sequence.tokens[3:]) == (3, True, [UNKNOWN, UNKNOWN])
    settle(s, first, 5)
    settle(s, second, 6)
    assert sequence.tokens[3:] == [5, 6]


def test_a_stop_token_discards_what_the_next_step_samples_and_then_frees_the_blocks() -> None:
    s, arrive = scheduler(), Arrivals()
    sequence = arrive(prompt=3)
    s.add(sequence)
    first, second = scheduled(s), scheduled(s)
    assert s.settle(first, [0]) == [sequence]
    assert sequence.finish_reason == FinishReason.STOP
    assert s.pool.num_free < s.pool.num_blocks, "a step in flight writes the blocks"
    assert not s.has_work
    assert s.settle(second, [9]) == [None]
    s.check_integrity()
    assert s.pool.num_free == s.pool.num_blocks
    assert 9 not in sequence.tokens


def test_no_step_is_scheduled_beyond_max_tokens() -> None:
    s, arrive = scheduler(), Arrivals()
    s.add(arrive(prompt=3, generate=1))
    first = scheduled(s)
    assert s.schedule() is None
    settle(s, first)
    assert not s.has_work
    assert s.pool.num_free == s.pool.num_blocks


@pytest.mark.parametrize("generate", [2, 3, 7])
def test_no_step_computes_the_last_token(generate: int) -> None:
    s, arrive = scheduler(block_size=16), Arrivals()
    sequence = arrive(prompt=3, generate=generate)
    s.add(sequence)
    in_flight = [scheduled(s)]
    for _ in range(generate - 1):
        in_flight.append(scheduled(s))
        settle(s, in_flight.pop(0))
    assert s.schedule() is None, "a step in flight samples the last token"
    settle(s, in_flight.pop())
    assert sequence.tokens[3:] == [7] * generate


def test_blocks_of_a_cancelled_sequence_stay_reserved_while_a_step_writes_them() -> None:
    s, arrive = scheduler(), Arrivals()
    sequence = arrive(prompt=3)
    s.add(sequence)
    first, second = scheduled(s), scheduled(s)
    s.cancel(sequence)
    for plan in (first, second):
        assert s.pool.num_free < s.pool.num_blocks
        s.check_integrity()
        assert s.settle(plan, [7]) == [None]
    assert s.pool.num_free == s.pool.num_blocks


def test_no_sequence_is_preempted_while_a_step_is_in_flight() -> None:
    s, arrive = scheduler(blocks=3, block_size=4, budget=16), Arrivals()
    old, new = arrive(prompt=4, generate=8), arrive(prompt=4, generate=8)
    s.add(old)
    s.add(new)
    first = scheduled(s)  # both prompts fill a block each, and the next tokens need two more
    assert s.schedule() is None
    settle(s, first)
    second = scheduled(s)
    assert second.preempted == (new,)
    assert new.tokens[4:] == [7], "its last token is known"


def test_a_prompt_waits_for_a_block_that_a_step_in_flight_computes() -> None:
    s, arrive = scheduler(budget=8, block_size=4), Arrivals()
    first, second = (arrive(prompt=[5, 6, 7, 8, 9], salt="") for _ in range(2))
    s.add(first)
    plan = scheduled(s)
    s.add(second)
    ahead = scheduled(s)
    assert [chunk.sequence for chunk in ahead.chunks] == [first]
    settle(s, plan)
    later = scheduled(s)
    assert second.num_cached_tokens == 4
    assert second in [chunk.sequence for chunk in later.chunks]


def test_a_block_that_an_equal_one_replaces_stays_reserved_while_a_step_in_flight_reads_it() -> None:
    s, arrive = scheduler(blocks=8, block_size=4), Arrivals()
    for _ in range(2):
        s.add(arrive(prompt=[5, 6, 7], generate=9, salt=""))
    prompts, filling, reading = scheduled(s), scheduled(s), scheduled(s)
    settle(s, prompts)
    own, free = s.running[1].block_table[0], s.pool.num_free
    settle(s, filling)
    assert s.running[1].block_table[0] == s.running[0].block_table[0] != own
    assert s.pool.num_free == free, "the block was freed under a step that reads it"
    settle(s, reading)
    assert s.pool.num_free == free + 1
