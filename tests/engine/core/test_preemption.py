"""Preemption by recomputation and swapping."""

from __future__ import annotations

from fastgen.core.blocks.preemption import HostBuffer, Preemption
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_model import StepModel
from fastgen.core.step_times import StepTime, StepWork
from support.scheduling import Arrivals, run, run_to_end, scheduler, sizes


def model(base: float, token: float) -> StepModel:
    """A step model of base + token * tokens seconds."""
    return StepModel.of(StepTime(StepWork(size), base + token * size) for size in (8, 16, 32, 64, 128, 256) * 3)


def swapping(mode: str, *, host: int = 100, copy: float = 0.001, blocks: int = 4) -> Scheduler:
    preemption = Preemption(mode, model(0.01, 0.001), copy)  # type: ignore[arg-type]
    return scheduler(blocks=blocks, host=HostBuffer(host), preemption=preemption)


def test_a_swapped_sequence_is_copied_out_and_back_without_recomputation() -> None:
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


def test_blocks_still_in_the_prefix_cache_are_not_copied_back() -> None:
    s, arrive = swapping("swap"), Arrivals()
    s.add(arrive(prompt=[1] * 8, generate=2, salt=""))
    s.add(arrive(prompt=[2] * 8, generate=4, salt=""))
    run(s)
    out = run(s).swap_out
    assert len(out) == 2
    back = run(s).swap_in
    assert len(back) < 2


def test_auto_picks_the_cheaper_of_swapping_and_recomputation() -> None:
    # Recomputing 8 tokens takes 8 ms. Two blocks out and back are four copies.
    for copy, swaps in ((0.001, True), (0.004, False)):
        s, arrive = swapping("auto", copy=copy), Arrivals()
        s.add(arrive(prompt=8, generate=2))
        s.add(arrive(prompt=8, generate=4))
        run(s)
        assert bool(run(s).swap_out) == swaps
        run_to_end(s)


def test_a_full_host_buffer_falls_back_to_recomputation() -> None:
    s, arrive = swapping("swap", host=1), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    plan = run(s)
    assert plan.preempted
    assert not plan.swap_out
    assert sizes(run(s)) == {"1": 9}


def test_mode_recompute_never_swaps() -> None:
    s, arrive = swapping("recompute", copy=0.0), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    assert not run(s).swap_out


def test_cancelling_a_swapped_sequence_frees_its_host_blocks() -> None:
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


def test_swapped_sequences_are_readmitted_before_new_ones() -> None:
    s, arrive = swapping("swap"), Arrivals()
    s.add(arrive(prompt=8, generate=2))
    s.add(arrive(prompt=8, generate=4))
    run(s)
    run(s)
    s.add(arrive(prompt=1, generate=1))
    assert set(sizes(run(s))) == {"1", "2"}
    assert s.running[0].id == "1"


def test_the_lowest_priority_is_preempted_even_if_it_arrived_first() -> None:
    s, arrive = scheduler(blocks=4), Arrivals()
    low, high = arrive(prompt=8, generate=4, priority=5), arrive(prompt=8, generate=4, priority=1)
    s.add(low)
    s.add(high)
    run(s)
    assert run(s).preempted == (low,)


def test_a_half_prefilled_prompt_of_higher_priority_preempts_decodes() -> None:
    s, arrive = scheduler(blocks=6, budget=8), Arrivals()
    low = arrive(prompt=7, generate=16, priority=1)
    s.add(low)
    run(s)
    high = arrive(prompt=20, generate=2)
    s.add(high)
    while high.num_generated_tokens == 0:
        before = high.num_computed_tokens
        run(s)
        assert high.num_computed_tokens > before, "the higher-priority sequence did not advance"
    assert low.num_preemptions == 1
    run_to_end(s)
