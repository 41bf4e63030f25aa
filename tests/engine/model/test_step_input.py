"""Flattening of a step plan."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model.step_input import StepInput, StepInputBuilder
from support.driving import forward_input, sequence
from support.scheduling import Arrivals, scheduler


def chunk(num_tokens: int, *, start: int, size: int, blocks: list[int]) -> Chunk:
    made = sequence(list(range(100, 100 + num_tokens)), blocks)
    made.num_computed_tokens = start
    return Chunk(made, start, size)


def test_rows_are_tokens_with_positions_and_slots() -> None:
    plan = StepPlan(
        (
            chunk(18, start=17, size=1, blocks=[4, 2]),
            chunk(1, start=0, size=1, blocks=[9]),
            chunk(40, start=14, size=4, blocks=[7, 1]),
            chunk(3, start=0, size=3, blocks=[0]),
        )
    )
    step_input = forward_input(plan, 16)
    assert step_input.token_ids.tolist() == [117, 100, 114, 115, 116, 117, 100, 101, 102]
    assert step_input.positions.tolist() == [17, 0, 14, 15, 16, 17, 0, 1, 2]
    assert step_input.blocks.tolist() == [2, 9, 7, 7, 1, 1, 0, 0, 0]
    assert step_input.slots.tolist() == [1, 0, 14, 15, 0, 1, 0, 1, 2]
    assert step_input.logit_rows.tolist() == [0, 1, 8]  # the unfinished prompt is not sampled
    spans = [(span.row, span.num_tokens, span.context, span.blocks.tolist()) for span in step_input.chunks]
    assert spans == [(2, 4, 14, [7, 1]), (6, 3, 0, [0])]
    starts = step_input.table_starts.tolist()
    assert [step_input.tables[first : first + n].tolist() for first, n in zip(starts, (2, 1), strict=True)] == [
        [4, 2],
        [9],
    ]
    assert step_input.contexts.tolist() == [18, 1]
    assert [step_input.tables[span.table_start] for span in step_input.chunks] == [7, 0]


def test_a_step_without_decodes_is_flattened() -> None:
    step_input = forward_input(StepPlan((chunk(5, start=0, size=5, blocks=[3]),)), 16)
    assert (step_input.num_decodes, step_input.num_rows) == (0, 5)


def test_rows_with_prompt_logprobs_follow_the_sampled_rows() -> None:
    scored = SamplingParams(max_tokens=4, prompt_logprobs=0)
    half, whole = (sequence(list(range(9)), [number], sampling=scored) for number in (0, 1))
    silent = sequence(list(range(4)), [2])
    whole.tokens += [50, 51]  # generated tokens, recomputed after a preemption, get no prompt logprobs
    step_input = forward_input(StepPlan((Chunk(silent, 0, 4), Chunk(half, 0, 5), Chunk(whole, 0, 11))), 16)
    assert step_input.logit_rows.tolist() == [3, 19, *range(4, 9), *range(9, 17)]


def next_step(s: Scheduler, builder: StepInputBuilder, token: int) -> StepInput:
    """Schedule a step in which every sampled token is `token`, and return its input."""
    plan = s.schedule()
    assert plan is not None
    step = builder.build(plan)
    s.settle(plan, [token] * len(step.sampled))
    s.check_integrity()
    return step


def test_a_decode_sends_neither_its_token_nor_blocks_that_the_runner_has() -> None:
    s, builder, arrive = scheduler(block_size=4), StepInputBuilder(4), Arrivals()
    sequence = arrive(prompt=9, generate=20)
    s.add(sequence)
    next_step(s, builder, token=20)
    for position in range(9, 25):
        step = next_step(s, builder, token=position + 12)
        block = sequence.block_table[position // 4]
        if position % 4 == 0:
            assert step.table_updates.T.tolist() == [[sequence.row, position // 4, block]]
        else:
            assert not step.table_updates.size
            assert step.token_ids.tolist() in ([-1], [position + 11])
        assert (step.rows.tolist(), step.seq_lens.tolist(), step.sampled.tolist()) == (
            [sequence.row],
            [position + 1],
            [0],
        )
        assert step.slot_mapping.tolist() == [block * 4 + position % 4]
    assert step.num_decodes == 1


def test_a_step_can_be_sent_to_other_processes() -> None:
    s, builder, arrive = scheduler(block_size=4), StepInputBuilder(4), Arrivals()
    s.add(arrive(prompt=9, generate=20))
    for plan in (s.schedule(), s.schedule()):
        assert plan is not None
        step = builder.build(plan)
        copy = pickle.loads(pickle.dumps(step))
        for field in fields(StepInput):
            ours, sent = getattr(step, field.name), getattr(copy, field.name)
            assert np.array_equal(ours, sent)
            assert not isinstance(ours, np.ndarray) or ours.dtype == sent.dtype == np.int32, field.name


def test_a_block_that_the_prefix_cache_replaced_is_sent_although_later_steps_are_in_flight() -> None:
    s, builder, arrive = scheduler(block_size=4, budget=64), StepInputBuilder(4), Arrivals()
    # Both compute equal blocks in the same step. The second one then shares those of the first.
    pair = [arrive([*range(10, 16)], generate=12, salt="") for _ in range(2)]
    for member in pair:
        s.add(member)
    sent: dict[tuple[int, int], int] = {}
    in_flight: list[StepPlan] = []
    for _ in range(12):
        plan = s.schedule()
        assert plan is not None
        for row, position, block in builder.build(plan).table_updates.T.tolist():
            sent[row, position] = block
        for member in plan.sequences:
            assert member.row is not None
            assert [sent[member.row, position] for position in range(len(member.block_table))] == member.block_table
        in_flight.append(plan)
        if len(in_flight) == 2:
            oldest = in_flight.pop(0)
            s.settle(oldest, [20] * sum(oldest.samples))
    assert pair[0].block_table[:3] == pair[1].block_table[:3], "no block was replaced"


def test_a_readmitted_sequence_sends_the_tokens_that_its_old_row_sampled() -> None:
    s, builder, arrive = scheduler(blocks=4, block_size=4, budget=6, sequences=2), StepInputBuilder(4), Arrivals()
    old, new = arrive(prompt=4, generate=8), arrive(prompt=[2, 3, 4], generate=9)
    s.add(old)
    s.add(new)
    while not new.num_preemptions:
        next_step(s, builder, token=30)
    assert not old.num_preemptions
    while old.finish_reason is None:
        next_step(s, builder, token=30)
        if old.finish_reason is not None:
            builder.release(old)
    known, sent = list(new.tokens), list[int]()
    assert new.is_waiting
    assert len(known) == 7, "a chunk of six tokens, then one of one"
    while new.num_computed_tokens < len(known):
        sent += next_step(s, builder, token=31).token_ids.tolist()
    assert sent == known


def test_a_decoding_sequence_that_lost_its_row_sends_everything_again() -> None:
    s, builder, arrive = scheduler(block_size=16), StepInputBuilder(16), Arrivals()
    sequence = arrive(prompt=3, generate=20)
    s.add(sequence)
    for token in (20, 21, 22):
        next_step(s, builder, token)
    builder.release(sequence)
    step = next_step(s, builder, token=23)
    (parameters,) = step.new_rows
    assert parameters.tokens == [1, 1, 1, 20, 21, 22]
    assert step.token_ids.tolist() == [22]
    assert step.table_updates.T.tolist() == [[sequence.row, 0, sequence.block_table[0]]]
