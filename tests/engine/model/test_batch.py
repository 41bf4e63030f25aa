"""Flattening a pass."""

from __future__ import annotations

import numpy as np
import pytest

from engine.model.driving import sequence
from fastgen.core.scheduler import Chunk, Pass
from fastgen.model.batch import Batch, decode_items


def chunk(num_tokens: int, *, start: int, size: int, blocks: list[int]) -> Chunk:
    made = sequence(list(range(100, 100 + num_tokens)), blocks)
    made.num_computed_tokens = start
    return Chunk(made, start, size)


def test_rows_are_tokens_with_their_positions_and_their_slots() -> None:
    pass_ = Pass(
        (
            chunk(18, start=17, size=1, blocks=[4, 2]),
            chunk(1, start=0, size=1, blocks=[9]),
            chunk(40, start=14, size=4, blocks=[7, 1]),
            chunk(3, start=0, size=3, blocks=[0]),
        )
    )
    batch = Batch.from_pass(pass_, block_size=16, num_kv_heads=2, num_threads=2)
    assert batch.token_ids.tolist() == [117, 100, 114, 115, 116, 117, 100, 101, 102]
    assert batch.positions.tolist() == [17, 0, 14, 15, 16, 17, 0, 1, 2]
    assert batch.blocks.tolist() == [2, 9, 7, 7, 1, 1, 0, 0, 0]
    assert batch.slots.tolist() == [1, 0, 14, 15, 0, 1, 0, 1, 2]
    assert batch.sample_rows.tolist() == [0, 1, 8]  # the long prompt is not done: nothing to sample
    spans = [(span.row, span.num_tokens, span.context, span.blocks.tolist()) for span in batch.chunks]
    assert spans == [(2, 4, 14, [7, 1]), (6, 3, 0, [0])]
    seen = {(row, head): (table, begin, end, part) for row, head, table, begin, end, part in batch.items.tolist()}
    assert seen == {(0, 0): (0, 0, 18, -1), (0, 1): (0, 0, 18, -1), (1, 0): (2, 0, 1, -1), (1, 1): (2, 0, 1, -1)}


def test_a_pass_without_decodes_has_no_items() -> None:
    batch = Batch.from_pass(
        Pass((chunk(5, start=0, size=5, blocks=[3]),)), block_size=16, num_kv_heads=3, num_threads=2
    )
    assert (len(batch.items), len(batch.merges), batch.num_parts, batch.num_rows) == (0, 0, 0, 5)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("contexts", [[1], [512], [513], [8192], [8000, 1, 700], [64] * 40, [5000] + [30] * 100])
def test_items_cover_every_key_of_every_head_once(contexts: list[int], num_threads: int) -> None:
    heads = 3
    items, merges, num_parts = decode_items(
        np.array(contexts), np.arange(len(contexts)) * 1000, num_kv_heads=heads, num_threads=num_threads
    )
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row, head, table, begin, end, part in items.tolist():
        assert table == row * 1000
        assert begin % 64 == 0
        assert begin < end
        covered.setdefault((row, head), []).append((begin, end, part))
    assert covered.keys() == {(row, head) for row in range(len(contexts)) for head in range(heads)}
    for (row, _), runs in covered.items():
        runs.sort()
        assert [begin for begin, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])]
        assert runs[-1][1] == contexts[row]
    merged = {(row, head): list(range(first, first + count)) for row, head, first, count in merges.tolist()}
    assert merged == {key: [part for *_, part in runs] for key, runs in covered.items() if len(runs) > 1}
    assert sorted(part for parts in merged.values() for part in parts) == list(range(num_parts))


def test_threads_get_even_shares_of_the_keys() -> None:
    contexts = np.array([2000] * 8 + [64] * 8)
    items, _, _ = decode_items(contexts, np.zeros(16, np.int64), num_kv_heads=3, num_threads=2)
    keys = items[:, 4] - items[:, 3]
    half = (len(items) + 1) // 2
    assert abs(int(keys[:half].sum()) - int(keys[half:].sum())) <= 512
