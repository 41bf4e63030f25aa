"""Sharing of cached prefixes between requests."""

from __future__ import annotations

from fastgen.core.blocks.block_pool import BlockPool, HostBuffer
from fastgen.core.blocks.kv_cache_manager import KVCacheManager
from fastgen.core.blocks.preemption import Preemption
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_model import StepModel
from support.scheduling import Arrivals, run, run_to_end, scheduler, sizes

TEN = list(range(1, 11))


def serve(s: Scheduler, arrive: Arrivals, prompt: list[int], generate: int = 1, salt: str = "") -> int:
    """Serve one request alone and return how many of its prompt tokens the first step computed."""
    s.add(arrive(prompt, generate, salt=salt))
    (chunk,) = run(s).chunks
    run_to_end(s)
    return chunk.num_tokens


def test_a_repeated_prompt_is_computed_only_after_its_cached_full_blocks() -> None:
    s, arrive = scheduler(), Arrivals()
    assert serve(s, arrive, TEN) == 10
    assert serve(s, arrive, TEN) == 2
    assert serve(s, arrive, [*TEN[:6], 99, 98, 97, 96]) == 6


def test_at_least_one_prompt_token_is_computed() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN[:8])
    assert serve(s, arrive, TEN[:8]) == 4


def test_equal_blocks_with_different_prefixes_are_not_shared() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert serve(s, arrive, [2, 2, 2, 2, 5, 5, 5, 5, 9]) == 9


def test_requests_with_another_salt_share_nothing() -> None:
    s, arrive = scheduler(), Arrivals()
    serve(s, arrive, TEN, salt="a")
    assert serve(s, arrive, TEN, salt="b") == 10
    assert serve(s, arrive, TEN, salt="a") == 2


def test_a_swapped_sequence_takes_no_block_of_another_salt() -> None:
    pool, host, table = BlockPool(4, 4), HostBuffer(2), list[int]()
    manager = KVCacheManager(pool, host, Preemption("swap", StepModel()))
    pool.extend(table, 8)
    pool.publish(table, TEN[:8], "theirs", 0, 2)
    swapped = Arrivals()(TEN, 4, salt="ours")
    swapped.host_blocks, swapped.num_computed_tokens = host.allocate(2), 8
    assert manager.match_prefix(swapped) == []
    swapped.cache_salt = "theirs"
    assert manager.match_prefix(swapped) == table


def test_the_next_turn_of_a_conversation_reuses_generated_tokens() -> None:
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


def test_a_sequence_waits_one_step_for_a_block_that_another_computes() -> None:
    s, arrive = scheduler(budget=64), Arrivals()
    s.add(arrive(TEN, salt=""))
    s.add(arrive(TEN, salt=""))
    assert sizes(run(s)) == {"0": 10}
    assert sizes(run(s)) == {"0": 1, "1": 2}


def test_equal_blocks_computed_twice_are_merged() -> None:
    s, arrive = scheduler(budget=64), Arrivals()
    s.add(arrive(TEN[:3], 20, salt=""))
    s.add(arrive(TEN[:3], 20, salt=""))
    run(s)  # no block is full, so both compute their own
    first, second = s.running
    assert first.block_table != second.block_table
    run(s)
    run(s)
    assert first.block_table[0] == second.block_table[0]


def test_free_blocks_are_used_before_the_least_recently_used_are_evicted() -> None:
    s, arrive = scheduler(blocks=8), Arrivals()
    old, new = [10] * 9, [20] * 9  # two full blocks each, and one that is freed
    serve(s, arrive, old)
    serve(s, arrive, new)
    serve(s, arrive, [30] * 15)  # takes the four free blocks and leaves three cached
    assert serve(s, arrive, old) == 1
    serve(s, arrive, [40] * 15)  # one is free, three are evicted: the two of `new` and the last of [30]
    assert serve(s, arrive, old) == 1
    assert serve(s, arrive, new) == 9


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    s, arrive = scheduler(blocks=4), Arrivals()
    serve(s, arrive, list(range(1, 14)))  # three full blocks
    serve(s, arrive, [50] * 7)  # needs two, one is free
    assert serve(s, arrive, list(range(1, 14))) == 13 - 8


def test_a_preempted_sequence_reuses_its_own_cached_blocks() -> None:
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
