"""Attention within chunks of positions (Llama 4): sequences begin with their last chunk, and prompt chunks are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model import ModelError
from fastgen.model.config.architecture import Experts, SigmoidRouting
from fastgen.model.layers.moe import route
from fastgen.model.layers.weights import Mixture
from fastgen.model.source import ModelSource
from fastgen.runner.loader import load_runner
from fastgen.settings import ConfigError, EngineConfig
from support.driving import forward_input, sequence
from support.tiny_models import saved

SIZE, BLOCK_SIZE = 32, 16
PAGES = SIZE // BLOCK_SIZE
LENGTHS = st.tuples(st.integers(0, 100), st.integers(1, 100))


@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_every_token_sees_the_keys_of_its_chunk_up_to_its_own(lengths: list[tuple[int, int]]) -> None:
    """Each sequence has some computed tokens, and some in the step."""
    chunks, first_block = [], 0
    for context, count in lengths:
        blocks = -(-(context + count) // BLOCK_SIZE)
        subject = sequence([0] * (context + count), [*range(first_block, first_block + blocks)])
        first_block += blocks
        subject.num_computed_tokens = context
        chunks.append(Chunk(subject, context, count))
    plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
    whole = forward_input(plan, BLOCK_SIZE)
    found = whole.within_chunks(SIZE, BLOCK_SIZE)
    seen = {
        row: (int(context), int(found.tables[start]))
        for row, (context, start) in enumerate(zip(found.contexts, found.table_starts, strict=True))
    }
    for span in found.chunks:
        assert len(span.blocks) == -(-(span.context + span.num_tokens) // BLOCK_SIZE)
        assert list(found.tables[span.table_start :][: len(span.blocks)]) == list(span.blocks)
        for index in range(span.num_tokens):
            seen[span.row + index] = (span.context + index + 1, int(span.blocks[0]))
    row = 0
    for chunk in plan.chunks:
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            first_page = position // SIZE * PAGES
            assert seen[row] == (position % SIZE + 1, chunk.sequence.block_table[first_page])
            row += 1
    assert len(seen) == row == whole.num_rows


def test_layers_with_chunks_need_their_size(tmp_path: Path) -> None:
    path = saved("llama4", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_chunk_size": None}))
    with pytest.raises(ModelError, match="layer_types has chunked_attention, but no attention_chunk_size is set"):
        ModelSource.open(str(path.parent))


def test_chunks_must_be_whole_blocks(tmp_path: Path) -> None:
    config = EngineConfig(model="m", block_size=64)
    words = "llama4_text models .* chunks of 32 .* must be whole blocks: use 32 or less"
    with pytest.raises(ConfigError, match=f"^--block-size 64: {words}"):
        load_runner(ModelSource.open(str(saved("llama4", tmp_path))), config, lambda _stage, _fraction: None)


def test_experts_without_a_correction_are_chosen_by_their_logits() -> None:
    """The sigmoids of large ones are equal."""
    shape = Experts(3, 1, 8, normalised=False, sigmoid=SigmoidRouting(corrected=False))
    logits = torch.tensor([[40.0, 41.0, 39.0]])
    weights, chosen = route(Mixture(shape, lambda x: x, None, range(3), (), None), logits)
    assert (weights.tolist(), chosen.tolist()) == ([[1.0]], [[1]])
