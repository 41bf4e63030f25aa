"""Paged attention with torch operations against a reference implementation."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kernels import reference
from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers import torch_attention
from fastgen.model.layers.torch_attention import TorchPagedAttention
from support.driving import forward_input, sequence

BLOCK_SIZE, KV_HEADS, NUM_BLOCKS, LAYERS = 16, 2, 64, 2
CPU = torch.device("cpu")
# (computed tokens, chunk tokens): decodes of very different lengths, first and later chunks.
CHUNKS = ((0, 1), (15, 1), (16, 1), (100, 1), (199, 1), (0, 2), (0, 40), (16, 16), (33, 50))


def random_cache(key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32) -> KVCache:
    shape = KVShape(LAYERS, KV_HEADS, key_dim, value_dim, dtype.itemsize)
    cache = KVCache(shape, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def make_pass() -> StepPlan:
    blocks = iter(random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    chunks = []
    for start, count in CHUNKS:
        table = [next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE))]
        subject = sequence(list(range(start + count)), table)
        subject.num_computed_tokens = start
        chunks.append(Chunk(subject, start, count))
    return StepPlan(tuple(chunks))


def expected(plan: StepPlan, cache: KVCache, layer: int, queries: torch.Tensor, **options: object) -> torch.Tensor:
    rows = iter(queries)
    return torch.cat(
        [
            slow_attention(
                torch.stack(list(itertools.islice(rows, chunk.num_tokens))),
                cache.keys[layer],
                cache.values[layer],
                torch.tensor(chunk.sequence.block_table),
                chunk.start,
                **options,  # type: ignore[arg-type]
            )
            for chunk in plan.chunks
        ]
    )


def slow_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention from its definition, one query and head at a time."""
    k, v = (cache[table].transpose(1, 2).flatten(0, 1) for cache in (keys, values))  # [tokens, kv heads, head_dim]
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros(*queries.shape[:2], values.shape[-1])
    for i, head in itertools.product(range(len(queries)), range(queries.shape[1])):
        seen = slice(max(0, start + i + 1 - window) if window else 0, start + i + 1)
        scores = k[seen, head // group] @ queries[i, head] * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        out[i, head] = scores.softmax(-1)[: seen.stop - seen.start] @ v[seen, head // group]
    return out


def attend(plan: StepPlan, cache: KVCache, layer: int, queries: torch.Tensor, **options: object) -> torch.Tensor:
    attention = TorchPagedAttention(forward_input(plan, BLOCK_SIZE), cache, CPU)
    return attention.attend(layer, queries, **options)  # type: ignore[arg-type]


def random_queries(heads: int, head_dim: int) -> torch.Tensor:
    return torch.randn(sum(count for _, count in CHUNKS), heads, head_dim, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("heads", [2, 6])
def test_torch_attention_equals_the_readable_twin(heads: int) -> None:
    cache, plan, queries = random_cache(24, 24), make_pass(), random_queries(heads, 24)
    rows = iter(queries)
    twin = torch.cat(
        [
            reference.paged_attention(
                torch.stack(list(itertools.islice(rows, chunk.num_tokens))),
                cache.keys[1],
                cache.values[1],
                torch.tensor(chunk.sequence.block_table),
                chunk.start,
                0.3,
            )
            for chunk in plan.chunks
        ]
    )
    torch.testing.assert_close(attend(plan, cache, 1, queries, scale=0.3), twin, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 7},
        {"window": 40},
        {"window": 10_000},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"window": 17, "softcap": 3.0, "sinks": torch.tensor([0.1, 0.2, 0.3, 4.0])},
    ],
    ids=str,
)
def test_windows_softcaps_and_sinks_match_their_definitions(options: dict[str, object]) -> None:
    cache, plan, queries = random_cache(16, 8), make_pass(), random_queries(4, 16)
    actual = attend(plan, cache, 0, queries, scale=0.25, **options)
    torch.testing.assert_close(actual, expected(plan, cache, 0, queries, scale=0.25, **options), atol=1e-5, rtol=1e-5)


def test_small_scratch_memory_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, plan, queries = random_cache(16, 16), make_pass(), random_queries(4, 16)
    whole = attend(plan, cache, 0, queries, scale=0.25, window=30)
    monkeypatch.setattr(torch_attention, "MAX_SCRATCH_ELEMENTS", 700)
    torch.testing.assert_close(attend(plan, cache, 0, queries, scale=0.25, window=30), whole, atol=1e-5, rtol=1e-5)


def test_keys_and_values_are_written_only_to_the_slots_of_their_tokens() -> None:
    cache, plan = random_cache(8, 4), make_pass()
    before = cache.keys.clone(), cache.values.clone()
    batch = forward_input(plan, BLOCK_SIZE)
    keys, values = torch.randn(batch.num_rows, KV_HEADS, 8), torch.randn(batch.num_rows, KV_HEADS, 4)
    TorchPagedAttention(batch, cache, CPU).store(1, keys, values)
    row = 0
    for chunk in plan.chunks:
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            block, slot = chunk.sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            assert torch.equal(cache.keys[1, block, :, slot], keys[row])
            assert torch.equal(cache.values[1, block, :, slot], values[row])
            before[0][1, block, :, slot] = keys[row]
            before[1][1, block, :, slot] = values[row]
            row += 1
    assert torch.equal(cache.keys, before[0])
    assert torch.equal(cache.values, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    cache, plan, queries = random_cache(16, 16, dtype), make_pass(), random_queries(4, 16)
    actual = attend(plan, cache, 0, queries.to(dtype), scale=0.25)
    assert actual.dtype == dtype
    exact = random_cache(16, 16)
    exact.keys.copy_(cache.keys)
    exact.values.copy_(cache.values)
    torch.testing.assert_close(
        actual.float(), attend(plan, exact, 0, queries.to(dtype).float(), scale=0.25), atol=3e-2, rtol=3e-2
    )
