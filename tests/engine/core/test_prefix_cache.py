"""What requests that begin the same save each other."""

from __future__ import annotations

from fastgen.core.scheduler import Scheduler
from support.scheduling import Arrivals, run, run_to_end, scheduler, sizes

TEN = list(range(1, 11))


def serve(s: Scheduler, arrive: Arrivals, prompt: list[int], generate: int = 1, salt: str = "") -> int:
    """Serves one request alone; returns how many of its prompt tokens were computed first."""
    s.add(arrive(prompt, generate, salt=salt))
    (chunk,) = run(s).chunks
    run_to_end(s)
    return chunk.num_tokens


def test_a_prompt_seen_before_is_computed_from_its_last_full_block_on() -> None:
    s, arrive = scheduler(), Arrivals()
    assert serve(s, arrive, TEN) == 10
    assert serve(s, arrive, TEN) == 2
    assert serve(s, arrive, [*TEN[:6], 99, 98, 97, 96]) == 6


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN[:8])
    assert serve(s, arrive, TEN[:8]) == 4


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert serve(s, arrive, [2, 2, 2, 2, 5, 5, 5, 5, 9]) == 9


def test_requests_of_another_salt_find_nothing() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN, salt="a")
    assert serve(s, arrive, TEN, salt="b") == 10
    assert serve(s, arrive, TEN, salt="a") == 2


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN[:4], generate=9)  # 7s; the last one has no KV
    assert serve(s, arrive, [*TEN[:4], *[7] * 8, 1]) == 1


def test_running_requests_share_blocks_and_each_block_is_counted_once() -> None:
    s, arrive = scheduler(budget=32), Arrivals()
    s.add(arrive(TEN, 20, salt=""))
    run(s)
    s.add(arrive(TEN, 20, salt=""))
    run(s)
    first, second = s.running
    assert first.block_table[:2] == second.block_table[:2]
    assert s.pool.num_blocks - s.pool.num_free == 4
    s.cancel(first)
    s.check_integrity()
    run_to_end(s)


def test_a_sibling_waits_a_pass_for_a_block_that_is_being_computed() -> None:
    s, arrive = scheduler(budget=64), Arrivals()
    s.add(arrive(TEN, salt=""))
    s.add(arrive(TEN, salt=""))
    assert sizes(run(s)) == {"0": 10}
    assert sizes(run(s)) == {"0": 1, "1": 2}


def test_sequences_that_computed_the_same_block_keep_one_of_them() -> None:
    s, arrive = scheduler(budget=64), Arrivals()
    s.add(arrive(TEN[:3], 20, salt=""))
    s.add(arrive(TEN[:3], 20, salt=""))
    run(s)  # no block is full: both compute their own
    first, second = s.running
    assert first.block_table != second.block_table
    run(s)
    run(s)
    assert first.block_table[0] == second.block_table[0]


def test_free_blocks_are_used_first_and_then_those_used_least_recently() -> None:
    s, arrive = scheduler(blocks=8), Arrivals()
    old, new = [10] * 9, [20] * 9  # two full blocks each, and one that is freed
    serve(s, arrive, old)
    serve(s, arrive, new)
    serve(s, arrive, [30] * 15)  # takes the four free ones, keeps three
    assert serve(s, arrive, old) == 1
    serve(s, arrive, [40] * 15)  # one is free, three are evicted: those of `new`, and the end of [30]
    assert serve(s, arrive, old) == 1
    assert serve(s, arrive, new) == 9


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    s, arrive = scheduler(blocks=4), Arrivals()
    serve(s, arrive, list(range(1, 14)))  # three full blocks
    serve(s, arrive, [50] * 7)  # needs two, one is free
    assert serve(s, arrive, list(range(1, 14))) == 13 - 8


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    s, arrive = scheduler(blocks=6, budget=32), Arrivals()
    s.add(arrive([1] * 8, 8, salt="old"))
    s.add(arrive([2] * 12, 2, salt="new"))
    run(s)
    assert [sequence.id for sequence in run(s).preempted] == ["1"]
    while "1" not in (scheduled := sizes(run(s))):
        pass
    assert scheduled["1"] < 13


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN)
    s.add(arrive(TEN, 1, salt="", prompt_logprobs=0))
    assert sizes(run(s)) == {"1": 10}
