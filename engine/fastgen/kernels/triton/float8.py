"""Triton kernel that quantises activations to float8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.triton.variant import Variant

_BLOCK, _WARPS = 2048, 8


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `_quantise_rows`; see `fastgen.kernels.gpu.float8.quantise_rows`."""
    rows, width = x.shape
    values, scales = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        _quantise_rows[(rows,)](x, values, scales, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return values, scales


@triton.jit
def _quantise_rows(x, values, scales, width, BLOCK: tl.constexpr):
    """Quantise one row. The second read comes from the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        part = tl.load(x + row * width + start + columns, mask=columns < width - start, other=0.0)
        most = tl.maximum(most, tl.abs(part.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    # NaN is the largest of the bits of absolute values, so that no NaN is lost.
    largest = tl.max(most.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    inverse = tl.where(largest == 0.0, 0.0, 448.0 / largest)
    tl.store(scales + row, largest / 448.0)
    for start in range(0, width, BLOCK):
        inside = columns < width - start
        part = tl.load(x + row * width + start + columns, mask=inside, other=0.0).to(tl.float32) * inverse
        part = tl.clamp(part, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(values + row * width + start + columns, part.to(tl.float8e4nv), mask=inside)


def _variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16", "fp32"):
        signature = {"x": f"*{dtype}:16", "values": "*fp8e4nv:16", "scales": "*fp32:16", "width": "i32:16"}
        # sm_80 cannot convert to float8_e4m3fn.
        yield Variant(dtype, _quantise_rows, signature, {"BLOCK": _BLOCK}, _WARPS, targets=(90, 100, 120))


VARIANTS = tuple(_variants())
