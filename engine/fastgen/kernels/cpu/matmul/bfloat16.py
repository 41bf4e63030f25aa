"""Products of bfloat16 inputs and weights, summed in float32, for any number of rows, on CPUs.

A weight [out, in] is stored as groups of `TILE_COLUMNS` outputs, [groups, in / 2, TILE_COLUMNS] of 32 bits: an element
holds the weights of one output and two inputs, the even input in its lower half. The part of a group that fits the L1
cache serves all rows before the next part is read, so weights are read from memory once.

With AVX512-BF16 the instruction vdpbf16ps adds both products to a sum; it takes denormal inputs and results as 0.
Elsewhere both halves are widened to float32 and added one after the other. A row's result does not depend on other
rows: each sum has a fixed order. Twin in plain torch: `torch.nn.functional.linear` in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.elements import ElementArray, is_float32
from fastgen.kernels.cpu.jit import compile_for_bfloat16, kernel, lowering, prange
from fastgen.kernels.cpu.llvm_vectors import F32, I32, I64, Emitter, emitted, emitted_by_count
from fastgen.kernels.cpu.matmul.tile import ROWS
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS, VECTORS, WIDTH, has_bfloat16, has_wide_vectors

PAIR = 2  # inputs of an element
_DEPTH = 128  # pairs of inputs per part: 24 KiB of weights with 512-bit vectors
_MOST_ROWS = 8 if has_wide_vectors() else ROWS  # per tile: of 32 registers, 24 hold sums
_ROWS_TOGETHER = 128  # whose sums stay in the cache until they are rounded

_PAIRS = ir.VectorType(I32, WIDTH)
_UPPER = 0xFFFF0000


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat16(), WIDTH * PAIR)


def _constant(value: int) -> Any:
    return ir.Constant(_PAIRS, [value] * WIDTH)


def _add_pairs(emit: Emitter, totals: list[Any], inputs: list[Any], weights: list[Any]) -> None:
    """Add the products of each row's pair of inputs, a scalar, with vectors of pairs to the row's totals."""
    builder = emit.builder
    if has_bfloat16():
        kind = ir.FunctionType(emit.floats, [emit.floats, _BFLOATS, _BFLOATS])
        multiply = lowering.get_or_insert_function(builder.module, kind, f"llvm.x86.avx512bf16.dpbf16ps.{WIDTH * 32}")
        vectors = [builder.bitcast(vector, _BFLOATS) for vector in weights]
        for row, pair in zip(totals, inputs, strict=True):
            spread = builder.bitcast(emit.spread(builder.bitcast(pair, F32)), _BFLOATS)
            for total, vector in zip(row, vectors, strict=True):
                builder.store(builder.call(multiply, [builder.load(total), spread, vector]), total)
        return
    for is_upper in (False, True):
        halves = [
            builder.and_(vector, _constant(_UPPER)) if is_upper else builder.shl(vector, _constant(16))
            for vector in weights
        ]
        vectors = [builder.bitcast(half, emit.floats) for half in halves]
        for row, pair in zip(totals, inputs, strict=True):
            half = builder.and_(pair, I32(_UPPER)) if is_upper else builder.shl(pair, I32(16))
            spread = emit.spread(builder.bitcast(half, F32))
            for total, vector in zip(row, vectors, strict=True):
                emit.add_product(total, spread, vector)


def _emit_tile(
    rows: int, builder: Any, x: Any, x_stride: Any, weights: Any, depth: Any, out: Any, out_stride: Any, adds: Any
) -> None:
    """Compute out [rows, TILE_COLUMNS] = x [rows, depth pairs] · weights [depth pairs, TILE_COLUMNS].

    Arguments are addresses, but `depth`, the strides, which are in bytes, and `adds`: 1 to add the product to out.
    """
    emit = Emitter(builder, WIDTH)
    totals = [emit.places(VECTORS) for _ in range(rows)]
    lines = [emit.offset(x, I64(row), x_stride) for row in range(rows)]
    with lowering.for_range(builder, depth) as step:
        line = emit.offset(weights, step.index, TILE_COLUMNS * 4)
        vectors = [emit.load(emit.offset(line, I64(vector), WIDTH * 4), _PAIRS) for vector in range(VECTORS)]
        inputs = [emit.load(emit.offset(first, step.index, 4), I32) for first in lines]
        _add_pairs(emit, totals, inputs, vectors)
    places = []
    for row, sums in enumerate(totals):
        line = emit.offset(out, I64(row), out_stride)
        places += [(total, emit.offset(line, I64(vector), WIDTH * 4)) for vector, total in enumerate(sums)]
    with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
        for total, place in places:
            builder.store(emit.add(emit.load(place), builder.load(total)), total)
    for total, place in places:
        emit.store(builder.load(total), place)


def _emit_rounded(builder: Any, element: Any, sums: Any, rows: Any, out: Any, out_stride: Any) -> None:
    """Store sums [rows, TILE_COLUMNS] as elements; `out_stride` is in bytes."""
    emit = Emitter(builder, WIDTH)
    with lowering.for_range(builder, rows) as row:
        source, target = emit.offset(sums, row.index, TILE_COLUMNS * 4), emit.offset(out, row.index, out_stride)
        for vector in range(VECTORS):
            values = emit.load(emit.offset(source, I64(vector), WIDTH * 4))
            emit.store_elements(values, emit.offset(target, I64(vector), WIDTH * element.bitwidth // 8), element)


_tile, _tallest_tile = emitted_by_count(_emit_tile), emitted(partial(_emit_tile, _MOST_ROWS))
_round = emitted(_emit_rounded)


@kernel("void(u4[:,::1], u4[:,:,::1], E[:,::1])")
def multiply(x: npt.NDArray[np.uint32], weights: npt.NDArray[np.uint32], out: ElementArray) -> None:
    """Set out [T, groups * TILE_COLUMNS] = x times the weights.

    Args:
        x: [T, in / 2], each element a pair of bfloat16 inputs.
        weights: [groups, in / 2, TILE_COLUMNS].
        out: float32, or bfloat16: sums are rounded once.
    """
    rows, depth = x.shape
    x_row, out_row = depth * 4, out.shape[1] * out.itemsize
    for group in prange(weights.shape[0]):
        # At least one row, because the last line writes it: the last layer has no rows in a step that samples nothing.
        kept = 1 if is_float32(out) else max(1, min(rows, _ROWS_TOGETHER))
        sums = np.empty((kept, TILE_COLUMNS), np.float32)
        for begin in range(0, rows, _ROWS_TOGETHER):
            end = min(rows, begin + _ROWS_TOGETHER)
            target = np.int64(out.ctypes.data + begin * out_row + group * TILE_COLUMNS * out.itemsize)
            place, place_row = np.int64(sums.ctypes.data), TILE_COLUMNS * 4
            if is_float32(out):
                place, place_row = target, out_row
            for first in range(0, depth, _DEPTH):
                size = min(_DEPTH, depth - first)
                part = weights.ctypes.data + (group * depth + first) * TILE_COLUMNS * 4
                row = begin
                while row < end:
                    a = x.ctypes.data + row * x_row + first * 4
                    c = place + (row - begin) * place_row
                    if end - row >= _MOST_ROWS:
                        _tallest_tile(a, x_row, part, size, c, place_row, first)
                        row += _MOST_ROWS
                    else:
                        _tile(min(ROWS, end - row), a, x_row, part, size, c, place_row, first)
                        row += ROWS
            if not is_float32(out):
                _round(out, place, end - begin, target, out_row)
        sums[0, 0] = 0  # keeps `sums` alive until here: numba does not see the uses of its address


compile_for_bfloat16(multiply)
