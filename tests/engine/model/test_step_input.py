"""Flattening of a step plan."""

from __future__ import annotations

from fastgen.core.request import SamplingParams
from fastgen.core.scheduler import Chunk, StepPlan
from support.driving import forward_input, sequence


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
    assert (step_input.logit_rows.tolist(), step_input.num_sampled) == (
        [0, 1, 8],
        3,
    )  # the unfinished prompt is not sampled
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
    assert step_input.num_sampled == 2
    assert step_input.logit_rows.tolist() == [3, 19, *range(4, 9), *range(9, 17)]
