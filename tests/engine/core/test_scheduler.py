"""Decisions of the scheduler."""

from __future__ import annotations

import pytest

from fastgen.core.step_plan import Chunk, StepPlan
from support.scheduling import Arrivals, run, scheduler, sizes


def test_a_long_prompt_is_split_over_steps_and_only_its_last_chunk_samples() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=40))
    chunks = [run(s).chunks[0] for _ in range(3)]
    assert [chunk.num_tokens for chunk in chunks] == [16, 16, 8]
    assert s.running[0].num_generated_tokens == 1


def test_short_prompts_are_fused_into_one_step_in_order_of_arrival() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    for _ in range(4):
        s.add(arrive(prompt=6))
    assert sizes(run(s)) == {"0": 6, "1": 6, "2": 4}


def test_all_decodes_are_scheduled_before_prompts_share_the_rest() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=3))
    s.add(arrive(prompt=3))
    run(s)
    s.add(arrive(prompt=100))
    assert sizes(run(s)) == {"0": 1, "1": 1, "2": 14}


def test_blocks_are_allocated_only_for_the_tokens_of_the_step() -> None:
    s, arrive = scheduler(budget=16, block_size=4), Arrivals()
    s.add(arrive(prompt=100, generate=100))
    run(s)
    assert s.pool.num_blocks - s.pool.num_free == 4


def test_a_decode_without_a_block_preempts_the_newest_sequence_and_blocks_admission() -> None:
    s, arrive = scheduler(blocks=4, block_size=4, budget=16), Arrivals()
    old, new, third = arrive(prompt=8, generate=8), arrive(prompt=8, generate=2), arrive(prompt=1, generate=1)
    s.add(old)
    s.add(new)
    run(s)
    s.add(third)
    plan = run(s)
    assert plan.preempted == (new,)
    assert sizes(plan) == {"0": 1}
    assert list(s.waiting) == [new, third]
    assert new.num_computed_tokens == 0


def test_a_preempted_sequence_keeps_its_tokens_and_recomputes_them() -> None:
    s, arrive = scheduler(blocks=4, block_size=4, budget=16), Arrivals()
    old, new = arrive(prompt=8, generate=2), arrive(prompt=8, generate=4)
    s.add(old)
    s.add(new)
    run(s)
    assert run(s).preempted == (new,)
    assert new.tokens[8:] == [7]
    assert sizes(run(s)) == {"1": 9}
    assert new.tokens[8:] == [7, 7]


def test_a_half_prefilled_prompt_can_be_preempted() -> None:
    s, arrive = scheduler(blocks=6, block_size=4, budget=14), Arrivals()
    old, new = arrive(prompt=4, generate=10), arrive(prompt=20, generate=1)
    s.add(old)
    s.add(new)
    run(s)
    assert 0 < new.num_computed_tokens < new.num_prompt_tokens
    preempted = []
    while not old.finish_reason:
        preempted += run(s).preempted
    assert preempted == [new]
    while not new.finish_reason:
        run(s)
    assert s.pool.num_free == 6


def test_a_preempted_sequence_is_readmitted_only_when_it_fits_with_growth() -> None:
    s, arrive = scheduler(blocks=6, block_size=4, budget=16), Arrivals()
    s.add(arrive(prompt=12, generate=8))
    s.add(arrive(prompt=8, generate=8))
    preempted_at = [i for i in range(8) if run(s).preempted]
    assert len(preempted_at) == 1
    assert [q.id for q in s.waiting] == ["1"] or s.waiting == []


def test_a_waiting_prompt_that_does_not_fit_is_not_overtaken() -> None:
    s, arrive = scheduler(blocks=4, block_size=4, budget=64), Arrivals()
    s.add(arrive(prompt=16 - 4, generate=4))
    run(s)
    s.add(arrive(prompt=2, generate=1))
    big, small = arrive(prompt=9, generate=1), arrive(prompt=1, generate=1)
    s.add(big)
    s.add(small)
    assert sizes(run(s)) == {"0": 1}
    assert "3" not in sizes(run(s))


def test_at_most_max_sequences_run() -> None:
    s, arrive = scheduler(budget=16, sequences=2), Arrivals()
    for _ in range(3):
        s.add(arrive(prompt=2))
    assert sizes(run(s)) == {"0": 2, "1": 2}


def test_an_end_token_frees_the_blocks_in_the_same_step() -> None:
    s, arrive = scheduler(), Arrivals()
    s.add(arrive(prompt=3))
    plan = s.schedule()
    assert plan is not None
    (ended,) = s.settle(plan, [0])
    assert ended is not None
    assert ended.finish_reason == "stop"
    assert s.pool.num_free == s.pool.num_blocks


def test_ignore_eos_continues_to_max_tokens() -> None:
    s, arrive = scheduler(), Arrivals()
    sequence = arrive(prompt=3, generate=4, ignore_eos=True)
    s.add(sequence)
    while s.has_work:
        run(s, token=0)
    assert (sequence.finish_reason, sequence.num_generated_tokens) == ("length", 4)


def test_min_tokens_delays_the_end() -> None:
    s, arrive = scheduler(), Arrivals()
    sequence = arrive(prompt=3, generate=9, min_tokens=3)
    s.add(sequence)
    while s.has_work:
        run(s, token=0)
    assert (sequence.finish_reason, sequence.num_generated_tokens) == ("stop", 3)


@pytest.mark.parametrize("state", ["waiting", "half-prefilled", "decoding", "preempted"])
def test_cancelling_frees_the_blocks_in_any_state(state: str) -> None:
    s, arrive = scheduler(blocks=4, block_size=4, budget=8, sequences=2), Arrivals()
    old = arrive(prompt=8, generate=8)
    victim = arrive(prompt={"waiting": 3, "half-prefilled": 12, "decoding": 3, "preempted": 7}[state], generate=4)
    s.add(old)
    run(s)
    s.add(victim)
    steps = {"waiting": 0, "half-prefilled": 1, "decoding": 1, "preempted": 6}[state]
    seen = [run(s) for _ in range(steps)]
    if state == "half-prefilled":
        assert 0 < victim.num_computed_tokens < victim.num_prompt_tokens
    if state == "decoding":
        assert victim.is_decoding
    if state == "preempted":
        assert any(victim in plan.preempted for plan in seen)
        assert victim in s.waiting
    s.cancel(victim)
    s.check_integrity()
    assert victim.finish_reason == "abort"
    assert victim not in s.running
    assert victim not in s.waiting
    s.cancel(old)
    assert s.pool.num_free == 4


def test_the_backlog_counts_prompt_tokens_not_yet_computed() -> None:
    s, arrive = scheduler(budget=16), Arrivals()
    s.add(arrive(prompt=4))
    run(s)
    s.add(arrive(prompt=30))
    s.add(arrive(prompt=50))
    assert s.stats(now=10.0).backlog_prompt_tokens == 80
    run(s)
    stats = s.stats(now=10.0)
    assert stats.backlog_prompt_tokens == 65
    assert (stats.num_running, stats.num_waiting, stats.kv_tokens) == (2, 1, 5 + 15)
    assert stats.oldest_waiting_seconds == 7.0


@pytest.mark.parametrize(("generated", "start", "decodes"), [(0, 3, 0), (2, 3, 0), (2, 4, 0), (2, 5, 1)])
def test_only_the_token_sampled_last_counts_as_a_decode(generated: int, start: int, decodes: int) -> None:
    sequence = Arrivals()(prompt=4)
    sequence.tokens += [7] * generated
    sequence.num_computed_tokens = start
    assert StepPlan((Chunk(sequence, start, 1),)).num_decode_tokens == decodes


def test_a_chunk_must_continue_its_sequence() -> None:
    sequence = Arrivals()(prompt=5)
    with pytest.raises(AssertionError):
        Chunk(sequence, start=2, num_tokens=1)
    with pytest.raises(AssertionError):
        Chunk(sequence, start=0, num_tokens=6)
