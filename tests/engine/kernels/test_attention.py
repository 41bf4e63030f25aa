"""The attention kernels against the reference.

Tolerance: float32 sums of another order; where scores reach 20, the last place of one alone is 2e-6 of its weight.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu import bfloat16  # noqa: F401  (importing it compiles the kernels)
from fastgen.kernels.cpu.attention.work_items import PART, TILE
from support.paged_attention import Paged, chunks, decode

TOLERANCE, TOLERANCE_OF_LARGE = 5e-6, 1e-5
SHAPES = [(64, 3, 3), (64, 2, 4), (128, 1, 8), (128, 2, 1), (32, 2, 4), (16, 1, 3)]  # head size, kv heads, group
# Groups that are no multiple of the heads computed together, and head sizes that are no multiple of a vector.
UNEVEN = [(64, 2, 7), (80, 2, 5), (72, 1, 6), (20, 3, 2), (12, 2, 1), (4, 1, 3)]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [*SHAPES, *UNEVEN])
def test_decode_attention_equals_the_reference(head_dim: int, kv_heads: int, group: int, block_size: int) -> None:
    contexts = [1, 15, 16, 17, 63, 64, 65, 127, 200, 513]
    paged = Paged(head_dim, kv_heads, block_size, contexts)
    queries = torch.randn(len(contexts), kv_heads * group, head_dim)
    out = decode(paged, queries, contexts, num_threads=2)
    for row, (context, table) in enumerate(zip(contexts, paged.tables, strict=True)):
        expected = reference.paged_attention(
            queries[row : row + 1], paged.keys, paged.values, table, context - 1, head_dim**-0.5
        )
        torch.testing.assert_close(out[row : row + 1], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("context", [512, 513, 1000, 4097])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_a_long_context_is_split_and_merged_with_the_same_result(context: int, num_threads: int) -> None:
    contexts = [context, 3]
    paged = Paged(64, 3, 64, contexts)
    queries = torch.randn(2, 9, 64) * 3
    out = decode(paged, queries, contexts, num_threads=num_threads)
    for row in range(2):
        expected = reference.paged_attention(
            queries[row : row + 1], paged.keys, paged.values, paged.tables[row], contexts[row] - 1, 1 / 8
        )
        torch.testing.assert_close(out[row : row + 1], expected, atol=TOLERANCE, rtol=0)


def test_slots_beyond_a_context_are_ignored() -> None:
    paged = Paged(64, 3, 64, [70])
    queries = torch.randn(1, 9, 64)
    before = decode(paged, queries, [70], num_threads=2)
    paged.keys[paged.tables[0][1], :, 6:] = 1e6
    paged.values[paged.tables[0][1], :, 6:] = -1e6
    after = decode(paged, queries, [70], num_threads=2)
    assert torch.equal(before, after)


def test_large_scores_neither_overflow_nor_lose_the_maximum() -> None:
    paged = Paged(64, 1, 64, [130])
    queries = torch.randn(1, 3, 64) * 100
    out = decode(paged, queries, [130], num_threads=2)
    expected = reference.paged_attention(queries, paged.keys, paged.values, paged.tables[0], 129, 1 / 8)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 8, 64, 65, 100, 513])
@pytest.mark.parametrize("block_size", [16, 128])
def test_decode_attention_is_limited_to_its_window(block_size: int, window: int, softcap: float | None) -> None:
    contexts = [1, 8, 9, 64, 65, 100, 101, 200, 1300]
    paged = Paged(32, 2, block_size, contexts)
    queries = torch.randn(len(contexts), 6, 32) * 3
    out = decode(paged, queries, contexts, num_threads=2, window=window, softcap=softcap)
    for row, (context, table) in enumerate(zip(contexts, paged.tables, strict=True)):
        expected = reference.paged_attention(
            queries[row : row + 1], paged.keys, paged.values, table, context - 1, 32**-0.5, window, softcap
        )
        torch.testing.assert_close(out[row : row + 1], expected, atol=TOLERANCE, rtol=0)


SINKS = torch.tensor([-40.0, -1.0, 0.5, 3.0, 12.0, 90.0])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_decode_attention_adds_the_sinks_once(window: int | None, num_threads: int) -> None:
    contexts = [1, 8, 65, 1300]  # the last is split
    paged = Paged(32, 2, 16, contexts)
    queries = torch.randn(len(contexts), 6, 32) * 3
    out = decode(paged, queries, contexts, num_threads=num_threads, window=window, sinks=SINKS)
    for row, (context, table) in enumerate(zip(contexts, paged.tables, strict=True)):
        expected = reference.paged_attention(
            queries[row : row + 1], paged.keys, paged.values, table, context - 1, 32**-0.5, window, sinks=SINKS
        )
        torch.testing.assert_close(out[row : row + 1], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("context", "num_tokens"), [(0, 2), (7, 2), (129, 70), (900, 33)])
def test_chunk_attention_adds_the_sinks_once(context: int, num_tokens: int, window: int | None) -> None:
    paged = Paged(32, 2, 16, [context + num_tokens])
    queries = torch.randn(num_tokens, 6, 32) * 3
    out = torch.full_like(queries, torch.nan)
    chunks(paged, queries, [(0, num_tokens, context)], out, window=window, sinks=SINKS)
    expected = reference.paged_attention(
        queries, paged.keys, paged.values, paged.tables[0], context, 32**-0.5, window, sinks=SINKS
    )
    torch.testing.assert_close(out, expected, atol=TOLERANCE_OF_LARGE, rtol=0)


def test_slots_before_a_window_are_ignored() -> None:
    paged = Paged(64, 3, 64, [200])
    queries = torch.randn(1, 9, 64)
    before = decode(paged, queries, [200], num_threads=2, window=60)
    paged.keys[paged.tables[0][2], :, :12] = 1e6
    paged.values[paged.tables[0][2], :, :12] = -1e6
    after = decode(paged, queries, [200], num_threads=2, window=60)
    assert torch.equal(before, after)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 8, 64, 100])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("context", "num_tokens"), [(0, 2), (0, 70), (7, 2), (63, 3), (129, 70), (900, 33)])
def test_chunk_attention_applies_window_and_softcap(
    context: int, num_tokens: int, block_size: int, window: int | None, softcap: float | None
) -> None:
    paged = Paged(32, 2, block_size, [context + num_tokens])
    queries = torch.randn(num_tokens, 6, 32) * 3
    out = torch.full_like(queries, torch.nan)
    chunks(paged, queries, [(0, num_tokens, context)], out, window=window, softcap=softcap)
    expected = reference.paged_attention(
        queries, paged.keys, paged.values, paged.tables[0], context, 32**-0.5, window, softcap
    )
    torch.testing.assert_close(out, expected, atol=TOLERANCE_OF_LARGE, rtol=0)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), SHAPES)
@pytest.mark.parametrize(
    ("context", "num_tokens"),
    [(0, 2), (0, 65), (1, 2), (63, 3), (129, 70), (8 * TILE, 5), (8 * TILE + 1, 33)],
)
def test_chunk_attention_equals_the_reference(
    head_dim: int, kv_heads: int, group: int, block_size: int, context: int, num_tokens: int
) -> None:
    paged = Paged(head_dim, kv_heads, block_size, [context + num_tokens])
    queries = torch.randn(num_tokens + 5, kv_heads * group, head_dim)
    out = torch.full_like(queries, 7.0)
    chunks(paged, queries, [(3, num_tokens, context)], out)
    rows = slice(3, 3 + num_tokens)
    expected = reference.paged_attention(
        queries[rows], paged.keys, paged.values, paged.tables[0], context, head_dim**-0.5
    )
    torch.testing.assert_close(out[rows], expected, atol=TOLERANCE, rtol=0)
    assert (out[:3] == 7).all()
    assert (out[3 + num_tokens :] == 7).all()


def test_chunks_of_several_sequences_are_attended_at_once() -> None:
    spans = [(0, 40, 0), (40, 3, 500), (43, 130, 77), (175, 2, 1)]
    paged = Paged(64, 3, 16, [context + num_tokens for _, num_tokens, context in spans])
    queries = torch.randn(180, 9, 64)
    out = torch.full_like(queries, 7.0)
    chunks(paged, queries, spans, out)
    untouched = torch.ones(len(out), dtype=torch.bool)
    for (row, num_tokens, context), table in zip(spans, paged.tables, strict=True):
        rows = slice(row, row + num_tokens)
        untouched[rows] = False
        expected = reference.paged_attention(queries[rows], paged.keys, paged.values, table, context, 1 / 8)
        torch.testing.assert_close(out[rows], expected, atol=TOLERANCE, rtol=0)
    assert (out[untouched] == 7).all()


def test_a_chunk_with_large_scores_stays_exact() -> None:
    paged = Paged(64, 1, 64, [200])
    queries = torch.randn(70, 3, 64) * 100
    out = torch.empty_like(queries)
    chunks(paged, queries, [(0, 70, 130)], out)
    expected = reference.paged_attention(queries, paged.keys, paged.values, paged.tables[0], 130, 1 / 8)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


def test_slots_after_a_chunk_in_its_last_block_are_ignored() -> None:
    paged = Paged(64, 3, 64, [100])
    queries = torch.randn(30, 9, 64)
    before, after = torch.empty_like(queries), torch.empty_like(queries)
    chunks(paged, queries, [(0, 30, 70)], before)
    paged.keys[paged.tables[0][1], :, 36:] = 1e6
    paged.values[paged.tables[0][1], :, 36:] = torch.nan
    chunks(paged, queries, [(0, 30, 70)], after)
    assert torch.equal(before, after)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (70, None, True), (600, 2.0, False), (1, None, True)]
)
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "block_size"), [(64, 3, 3, 64), (128, 1, 8, 16), (72, 1, 2, 256), (20, 2, 3, 16)]
)
def test_a_token_has_the_same_bits_in_any_chunk_and_as_a_decode(
    head_dim: int, kv_heads: int, group: int, block_size: int, window: int | None, softcap: float | None,
    has_sinks: bool, rounded: bool,
) -> None:  # fmt: skip
    """Across the boundaries of tiles, and of the parts in which contexts are split."""
    length = 2 * PART + 30
    paged = Paged(head_dim, kv_heads, block_size, [length])
    if rounded:
        paged.round()
    queries = torch.randn(length, kv_heads * group, head_dim) * 3
    limits = {"window": window, "softcap": softcap, "sinks": torch.randn(kv_heads * group) if has_sinks else None}
    results = []
    for sizes in ([length], [PART + 1, 2, PART + 27], [40] * 26 + [14]):
        out, row = torch.full(queries.shape, torch.nan, dtype=paged.keys.dtype), 0
        for size in sizes:
            chunks(paged, queries, [(row, size, row)], out, **limits, as_decodes=True)
            row += size
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)
    for row in (0, 1, 63, 64, 100, PART - 1, PART, PART + 1, 2 * PART - 1, 2 * PART, length - 1):
        alone = decode(paged, queries[row : row + 1].contiguous(), [row + 1], num_threads=2, **limits)
        assert torch.equal(alone[0], results[0][row]), f"row {row}"


def test_the_faster_order_of_chunks_does_not_depend_on_the_chunk_either() -> None:
    length = PART + 100
    paged = Paged(64, 3, 64, [length])
    queries = torch.randn(length, 9, 64)
    whole, parts = torch.empty_like(queries), torch.empty_like(queries)
    chunks(paged, queries, [(0, length, 0)], whole)
    for row in range(0, length, 68):
        chunks(paged, queries, [(row, min(68, length - row), row)], parts)
    assert torch.equal(whole, parts)
    exact = torch.empty_like(queries)
    chunks(paged, queries, [(0, length, 0)], exact, as_decodes=True)
    assert not torch.equal(whole, exact), "the two orders differ, or as_decodes would be free"
