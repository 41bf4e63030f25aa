"""Triton kernels of products with weights of 4-bit integers.

Decodes read the weight once and dequantise it in registers. Their time is that of reading it, for which every
multiprocessor is needed: where a weight has few outputs, the depth of the sum is split, and a second kernel adds the
parts in their order, so that a result does not depend on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastgen.kernels.triton.variant import Variant

_MOST_ROWS = 64  # of a product that dequantises in registers
_TILES = (16, _MOST_ROWS)  # rows of a program
_OUTPUTS = 64  # of a program
_DEPTHS = (128, 64, 32)  # columns at a time, which one group contains
_PROGRAMS = 264  # wanted: two for each multiprocessor of an H100
_MOST_SPLITS = 16
_WARPS, _STAGES = 4, 4
# By rows and columns of a program; for compute capability 10.0 the compiler takes 80, and spills.
_MOST_REGISTERS = {(16, 128): 128}
_SUM_BLOCK, _SUM_WARPS = 1024, 4
_DEQUANTISE_BYTES, _DEQUANTISE_WARPS = 1024, 4


def int4_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Launch the kernels of a product; see `fastgen.kernels.gpu.int4.int4_product`."""
    (rows, columns), (outputs, groups) = x.shape, scales.shape
    if rows > _MOST_ROWS:
        weight = x.new_empty(outputs, columns)
        _dequantise[(outputs, triton.cdiv(columns // 2, _DEQUANTISE_BYTES))](
            packed, scales, offsets, weight, columns, groups, BYTES=_DEQUANTISE_BYTES, num_warps=_DEQUANTISE_WARPS
        )
        return F.linear(x, weight)
    out = x.new_empty(rows, outputs)
    if rows:
        depth = next(depth for depth in _DEPTHS if columns // groups % depth == 0)
        tile = next(tile for tile in _TILES if rows <= tile)
        blocks = triton.cdiv(outputs, _OUTPUTS)
        splits = min(max(_PROGRAMS // blocks, 1), _MOST_SPLITS, columns // depth)
        parts = x.new_empty(splits, rows, outputs, dtype=torch.float32)
        _multiply[(blocks, splits)](
            x, packed, scales, offsets, parts, rows, outputs, columns, groups, splits,
            ROWS=tile, OUTPUTS=_OUTPUTS, DEPTH=depth, num_warps=_WARPS, num_stages=_STAGES,
            maxnreg=_MOST_REGISTERS.get((tile, depth)),
        )  # fmt: skip
        _sum_parts[(triton.cdiv(rows * outputs, _SUM_BLOCK),)](
            parts, out, rows * outputs, splits, BLOCK=_SUM_BLOCK, num_warps=_SUM_WARPS
        )
    return out


@triton.jit(do_not_specialize=["rows", "groups", "splits"])
def _multiply(
    x, packed, scales, offsets, parts, rows, outputs, columns, groups, splits,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute OUTPUTS columns of the product over one part of the depth."""
    row, output = tl.arange(0, ROWS)[:, None], tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    exists, inside, split = row < rows, output < outputs, tl.program_id(1)
    steps = columns // DEPTH
    first, last = split * steps // splits, (split + 1) * steps // splits
    half = tl.arange(0, DEPTH // 2)
    column = half // 16 * 32 + half % 16
    integers = packed + output.to(tl.int64) * (columns // 2) + half[:, None]
    inputs = x + row.to(tl.int64) * columns + column[None, :]
    size = columns // groups
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for step in range(first, last):
        start = step * DEPTH
        both = tl.load(integers + start // 2, mask=inside, other=0)
        group = output * groups + start // size
        scale, offset = (
            tl.load(scales + group, mask=inside, other=0.0),
            tl.load(offsets + group, mask=inside, other=0.0),
        )
        low = ((both & 15).to(tl.float32) * scale + offset).to(x.dtype.element_ty)
        high = ((both >> 4).to(tl.float32) * scale + offset).to(x.dtype.element_ty)
        total = tl.dot(tl.load(inputs + start, mask=exists, other=0.0), low, total, input_precision="ieee")
        total = tl.dot(tl.load(inputs + start + 16, mask=exists, other=0.0), high, total, input_precision="ieee")
    place = (split * rows + row).to(tl.int64) * outputs + output
    tl.store(parts + place, total, mask=exists & inside)


@triton.jit(do_not_specialize=["size", "splits"])
def _sum_parts(parts, out, size, splits, BLOCK: tl.constexpr):
    """Add the parts of BLOCK results."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(parts + tl.cast(split, tl.int64) * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@triton.jit(do_not_specialize=["groups"])
def _dequantise(packed, scales, offsets, weight, columns, groups, BYTES: tl.constexpr):
    """Dequantise BYTES bytes of one output's weights."""
    output = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = place < columns // 2
    both = tl.load(packed + output * (columns // 2) + place, mask=inside, other=0)
    column = place // 16 * 32 + place % 16
    group = output * groups + column // (columns // groups)
    scale, offset = tl.load(scales + group, mask=inside, other=0.0), tl.load(offsets + group, mask=inside, other=0.0)
    kind: tl.constexpr = weight.dtype.element_ty
    target = weight + output * columns + column
    tl.store(target, ((both & 15).to(tl.float32) * scale + offset).to(kind), mask=inside)
    tl.store(target + 16, ((both >> 4).to(tl.float32) * scale + offset).to(kind), mask=inside)


def _variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16"):
        weight = {"packed": "*u8:16", "scales": "*fp32:16", "offsets": "*fp32:16", "columns": "i32:16", "groups": "i32"}
        product = weight | {
            "x": f"*{dtype}:16",
            "parts": "*fp32:16",
            "rows": "i32",
            "outputs": "i32:16",
            "splits": "i32",
        }
        for tile in _TILES:
            for depth in _DEPTHS:
                constants = {"ROWS": tile, "OUTPUTS": _OUTPUTS, "DEPTH": depth}
                name, most = f"{dtype}_tile_{tile}_depth_{depth}", _MOST_REGISTERS.get((tile, depth))
                yield Variant(name, _multiply, product, constants, _WARPS, _STAGES, max_registers=most)
        sums = {"parts": "*fp32:16", "out": f"*{dtype}:16", "size": "i32", "splits": "i32"}
        yield Variant(dtype, _sum_parts, sums, {"BLOCK": _SUM_BLOCK}, _SUM_WARPS)
        dequantised = weight | {"weight": f"*{dtype}:16"}
        yield Variant(dtype, _dequantise, dequantised, {"BYTES": _DEQUANTISE_BYTES}, _DEQUANTISE_WARPS)


VARIANTS = tuple(_variants())
