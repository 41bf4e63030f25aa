"""Who makes room, how, and how they come back."""

from __future__ import annotations

from fastgen.core.budget_tuning import StepTime
from fastgen.core.preemption import HostBuffer, Preemption
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_model import StepModel
from support.scheduling import Arrivals, run, run_to_end, scheduler, sizes


def line(base: float, token: float) -> StepModel:
    """A model that knows step = base + token * tokens."""
    return StepModel.of(StepTime(size, 0, base + token * size) for size in (8, 16, 32, 64, 128, 256) * 3)


def swapping(mode: str, *, host: int = 100, copy: float = 0.001, blocks: int = 4) -> Scheduler:
    preemption = Preemption(mode, line(0.01, 0.001), copy)  # type: ignore[arg-type]
    return scheduler(blocks=blocks, host=HostBuffer(host), preemption=preemption)


def test_a_swapped_sequence_is_copied_out_whole_and_back_without_computing_again() -> None:
    s, arrive = swapping("swap"), Arrivals()
    old, new = arrive(prompt=8, generate=2), arrive(prompt=8, generate=4)
    s.add(old)
    s.add(new)
    run(s)
    table = list(new.block_table)
    plan = run(s)
    assert plan.preempted == (new,)
    assert [block for block, _ in plan.swap_out] == table
    assert (s.stats(0.0).num_swapped, s.stats(0.0).num_waiting) == (1, 0)
    back = run(s)
    assert [host for _, host in back.swap_in] == [host for _, host in plan.swap_out]
    assert sizes(back) == {"1": 1}
    assert s.stats(0.0).num_swapped == 0
    run_to_end(s)


def test_blocks_that_the_cache_kept_are_not_copied_back() -> None:
    s, arrive = swapping("swap"), Arrivals()
    s.add(arrive(prompt=[1] * 8, generate=2, salt=""))
    s.add(arrive(prompt=[2] * 8, generate=4, salt=""))
    run(s)
    out = run(s).swap_out
    assert len(out) == 2
    back = run(s).swap_in
    assert len(back) < 2


def test_the_better_of_two_ways_is_taken_for_each_victim() -> None:
    # Recomputing 8 tokens takes 8 ms. Two blocks out and back are four copies.
    for copy, swaps in ((0.001, True), (0.004, False)):
        s, arrive = swapping("auto", copy=copy), Arrivals()
        s.add(arrive(prompt=8, generate=2))
        s.add(arrive(prompt=8, generate=4))
        run(s)
        assert bool(run(s).swap_out) == swaps
        run_to_end(s)


def test_a_full_host_buffer_means_recomputing() -> None:
    s, arrive = swapping("swap", host=1), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    plan = run(s)
    assert plan.preempted
    assert not plan.swap_out
    assert sizes(run(s)) == {"1": 9}


def test_recompute_never_swaps() -> None:
    s, arrive = swapping("recompute", copy=0.0), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    assert not run(s).swap_out


def test_a_swapped_sequence_that_is_cancelled_frees_the_host() -> None:
    s, arrive = swapping("swap"), Arrivals()
    old, new = arrive(prompt=8, generate=8), arrive(prompt=8, generate=4)
    s.add(old)
    s.add(new)
    run(s)
    run(s)
    assert new.host_blocks
    s.cancel(new)
    s.check_integrity()
    assert not new.host_blocks
    assert s.stats(0.0).num_swapped == 0


def test_swapped_sequences_come_back_before_new_ones() -> None:
    s, arrive = swapping("swap"), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    run(s)
    s.add(arrive(prompt=1, generate=1))
    assert set(sizes(run(s))) == {"1", "2"}
    assert s.running[0].id == "1"


def test_the_worst_priority_makes_room_even_if_it_came_first() -> None:
    s, arrive = scheduler(blocks=4), Arrivals()
    worse, better = arrive(prompt=8, generate=4, priority=5), arrive(prompt=8, generate=4, priority=1)
    s.add(worse)
    s.add(better)
    run(s)
    assert run(s).preempted == (worse,)


def test_a_half_prefilled_prompt_of_the_best_priority_takes_blocks_from_decodes() -> None:
    s, arrive = scheduler(blocks=6, budget=8), Arrivals()
    worse = arrive(prompt=7, generate=16, priority=1)
    s.add(worse)
    run(s)
    best = arrive(prompt=20, generate=2)
    s.add(best)
    while best.num_generated_tokens == 0:
        before = best.num_computed_tokens
        run(s)
        assert best.num_computed_tokens > before, "the best did not get on"
    assert worse.num_preemptions == 1
    run_to_end(s)
