"""What `--deterministic` relies on: a token's attention and a row's product have the same bits in every step.

`test_instruction_sets` runs these tests once more for each instruction set that the processor can execute: vectors of
other widths, and products that are not fused with sums, take other code.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.kernels.cpu.attention.work_items import PART
from fastgen.model.layers.bfloat16_linear import BFloat16Linear
from fastgen.model.layers.linear import TiledLinear
from support.paged_attention import Paged, chunks, decode


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (20, 5)])
@pytest.mark.parametrize("window", [None, 550])
def test_a_decode_has_the_bits_of_its_token_in_a_chunk(window: int | None, head_dim: int, group: int) -> None:
    length = PART + 70
    paged = Paged(head_dim, 2, 16, [length])
    queries = torch.randn(length, 2 * group, head_dim) * 3
    sinks = torch.randn(2 * group)
    whole = torch.full_like(queries, torch.nan)
    chunks(paged, queries, [(0, length, 0)], whole, window=window, sinks=sinks, as_decodes=True)
    for row in (0, 63, 64, 100, PART - 1, PART, PART + 1, length - 1):
        alone = decode(paged, queries[row : row + 1].contiguous(), [row + 1], num_threads=2, window=window, sinks=sinks)
        assert torch.equal(alone[0], whole[row]), f"row {row}"


@pytest.mark.parametrize("kind", [TiledLinear, BFloat16Linear])
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(
    kind: type[TiledLinear] | type[BFloat16Linear],
) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if kind is TiledLinear else torch.bfloat16
    product, x = kind(torch.randn(100, 301).to(dtype)), torch.randn(40, 301).to(dtype)
    together = product(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 33):
        assert torch.equal(product(x[:rows].contiguous()), together[:rows])
        assert torch.equal(product(x[40 - rows :].contiguous()), together[40 - rows :])
