"""The embedding lookup: kernel against twin, twin against torch.

They are equal bit for bit, but the interpreter truncates bfloat16, which a GPU rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu.operator_bytes import embed_bytes

from fastgen.kernels.gpu import embedding

Import = Callable[[str], ModuleType]
LAST_IDS = torch.tensor([9, 4, 7], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 53.07])
@pytest.mark.parametrize(("ids", "hidden"), [([3], 1100), ([0, -1, 9, -1], 7), ([], 16)])
def test_the_lookup_equals_its_twin(
    interpreted: Import, ids: list[int], hidden: int, scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    table, token_ids = torch.randn(10, hidden).to(dtype), torch.tensor(ids, dtype=torch.int32)
    sources = torch.arange(len(ids), dtype=torch.int32) % 3
    for last_ids in (LAST_IDS, LAST_IDS.long()):
        expected = embedding.embed(table, token_ids, last_ids, sources, scale)
        out = interpreted("embedding").embed(table, token_ids, last_ids, sources, scale)
        torch.testing.assert_close(out, expected, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)


def test_minus_one_stands_for_the_token_sampled_last(interpreted: Import) -> None:
    table = torch.arange(10.0)[:, None].repeat(1, 16)
    ids, sources = torch.tensor([5, -1, -1], dtype=torch.int32), torch.tensor([1 << 30, 2, 0], dtype=torch.int32)
    for embed in (embedding.embed, interpreted("embedding").embed):
        # The source row of a known token is not read: here it lies far outside.
        assert embed(table, ids, LAST_IDS, sources, 2.0)[:, 0].tolist() == [10.0, 14.0, 18.0]


def test_the_scale_is_rounded_to_the_tables_dtype() -> None:
    table, ids = torch.ones(1, 16, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    rounded = torch.tensor(53.07, dtype=torch.bfloat16)
    expected = F.embedding(ids.long(), table) * rounded
    assert torch.equal(embedding.embed(table, ids, LAST_IDS, ids, 53.07), expected)


def test_bytes_count_the_rows_read_and_written() -> None:
    assert embed_bytes(3, 64, 2) == 3 * (64 * 2 * 2 + 4)
