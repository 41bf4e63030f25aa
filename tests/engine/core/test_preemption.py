"""Preemption by recomputation and swapping."""

from __future__ import annotations

import pytest

from fastgen.core.blocks.preemption import HostBuffer, Preemption
from fastgen.core.chunking import Chunker, FixedTarget
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_model import StepModel
from fastgen.core.step_times import StepCoefficients, StepTime, StepWork
from support.scheduling import Arrivals, Known, run, run_to_end, scheduler, sizes


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


def swapped_out(
    arrive: Arrivals, salt: str | None, *, long: Sequence | None = None
) -> tuple[Scheduler, list[Sequence]]:
    """Return a scheduler and equal decodes that were swapped out, 15 or 16; there are blocks for them again.

    Another decode runs. `long` arrived before them and is mid-prefill. From now on, the target cannot be met: a token
    of a long prompt takes longer.
    """
    times = Known(StepCoefficients())
    s = scheduler(
        blocks=100,
        block_size=64,
        budget=256,
        sequences=24,
        host=HostBuffer(100),
        preemption=Preemption("swap", times, 0.001),
        chunker=Chunker("even", FixedTarget(0.001, times)),
    )
    s.add(arrive(prompt=1, generate=1000, priority=-1))
    run(s)
    if long is not None:
        s.add(long)
        run(s)
    equal = [arrive(prompt=[5] * 100, generate=400, salt=salt) for _ in range(16)]
    for sequence in equal:
        s.add(sequence)
    while not all(sequence.is_decoding for sequence in equal):
        run(s)
    hog = arrive(prompt=6300, generate=100, priority=-2)
    s.add(hog)
    while not all(sequence.is_waiting for sequence in equal):
        run(s)
    s.cancel(hog)
    times.coefficients = StepCoefficients(0.02, 0.0005, 1e-6, 1e-5)
    # With a prefix cache, a sequence whose blocks are all shared is not copied.
    swapped = [sequence for sequence in equal if sequence.host_blocks]
    assert len(swapped) > 14
    return s, swapped


@pytest.mark.parametrize("salt", [None, ""], ids=["without a prefix cache", "with a prefix cache"])
def test_swapped_decodes_do_not_wait_for_the_time_of_a_long_prompt(salt: str | None) -> None:
    arrive = Arrivals()
    long = arrive(prompt=2500, generate=1)
    s, equal = swapped_out(arrive, salt, long=long)
    plan = run(s)
    assert {sequence.id: 1 for sequence in equal}.items() <= sizes(plan).items(), "not all are back in the next step"
    assert 0 < sizes(plan)[long.id] < 16, "the prompt advances"
    for _ in range(3):
        assert set(equal) <= set(run(s).sequences)
    assert not long.is_decoding


def test_swapped_decodes_behind_waiting_prompts_are_back_once_the_first_one_runs() -> None:
    """That is admitted first, because it ranks first. It takes the time of this step and of the next ones."""
    arrive = Arrivals()
    prompts = [arrive(prompt=2500, generate=1) for _ in range(2)]
    s, equal = swapped_out(arrive, None)
    for prompt in prompts:
        s.add(prompt)
    assert len(set(equal) & set(run(s).sequences)) >= 8, "they got no tokens of the prompt's other half"
    assert set(equal) <= set(run(s).sequences)
    assert [prompt.is_waiting for prompt in prompts] == [False, True]


def test_a_swapped_decode_does_not_wait_for_blocks_that_an_equal_prompt_computes() -> None:
    """It has them on the host."""
    s, arrive = swapping("swap", blocks=12), Arrivals()
    s.add(swapped := arrive(prompt=[5] * 12, generate=9, salt=""))
    run(s)
    s.add(hog := arrive(prompt=44, generate=3, priority=-1))
    while not swapped.host_blocks:
        run(s)
    s.cancel(hog)
    s.add(arrive(prompt=[5] * 24, generate=1, salt="", priority=-1))
    in_flight = s.schedule()
    assert in_flight is not None
    assert in_flight.keys
    plan = s.schedule()
    assert plan is not None
    assert swapped in plan.sequences


def test_a_swapped_decode_does_not_overtake_a_prompt_that_does_not_fit_yet() -> None:
    s, arrive = swapping("swap", host=1, blocks=8), Arrivals()
    first, prompt, short = arrive(prompt=8, generate=9), arrive(prompt=16, generate=9), arrive(prompt=3, generate=9)
    for sequence in (first, prompt, short):
        s.add(sequence)
    run(s)
    while not prompt.is_waiting:
        run(s)
    assert (bool(prompt.host_blocks), bool(short.host_blocks)) == (False, True)
    assert s.pool.num_free == 4, "room for the swapped one, not for both"
    while first.finish_reason is None:
        assert run(s).sequences == [first]
    assert prompt in run(s).sequences


def test_a_swapped_decode_does_not_take_the_last_token_of_a_step_from_a_prompt() -> None:
    """The token budget shrinks after a step has run out of GPU memory."""
    arrive = Arrivals()
    long = arrive(prompt=2500, generate=1)
    s, _ = swapped_out(arrive, None, long=long)
    s._limit.shrink(4)
    assert [s.running[0], long] == run(s).sequences
