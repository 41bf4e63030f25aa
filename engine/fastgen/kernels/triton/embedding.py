"""Triton kernel of the embedding lookup."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastgen.kernels.triton.variant import Variant

_BLOCK, _WARPS = 1024, 4


def embed(
    table: torch.Tensor, token_ids: torch.Tensor, last_ids: torch.Tensor, source_rows: torch.Tensor, scale: float
) -> torch.Tensor:
    """Launch `_embed`; see `fastgen.kernels.gpu.embedding.embed`."""
    rows, hidden = len(token_ids), table.shape[1]
    out = table.new_empty(rows, hidden)
    if rows:
        rounded = scale if scale == 1 else torch.tensor(scale, dtype=table.dtype).item()  # on the host
        _embed[(rows, triton.cdiv(hidden, _BLOCK))](
            table, token_ids, last_ids, source_rows, out, hidden, rounded, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out


@triton.jit
def _embed(table, token_ids, last_ids, source_rows, out, hidden, scale, BLOCK: tl.constexpr):
    """Look up BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    token = tl.load(token_ids + row).to(tl.int64)
    if token < 0:
        token = tl.load(last_ids + tl.load(source_rows + row)).to(tl.int64)
    found = tl.load(table + token * hidden + columns, mask=inside, other=0.0)
    tl.store(out + row * hidden + columns, (found.to(tl.float32) * scale).to(found.dtype), mask=inside)


VARIANTS = tuple(
    Variant(
        f"{dtype}_last_{last}",
        _embed,
        dict.fromkeys(("table", "out"), f"*{dtype}:16")
        | dict.fromkeys(("token_ids", "source_rows"), "*i32:16")
        | {"last_ids": f"*{last}:16", "hidden": "i32:16", "scale": "fp32"},
        {"BLOCK": _BLOCK},
        _WARPS,
    )
    for dtype in ("bf16", "fp16", "fp32")
    for last in ("i32", "i64")
)
