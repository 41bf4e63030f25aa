"""Products of int8 weights with activations quantised to int8, on processors with AVX512-VNNI.

Activations are quantised in each product (`quantise`), with one scale for every `BLOCK` inputs of a row, as the weights
have. The instruction vpdpbusd multiplies 64 unsigned with 64 signed bytes and adds each four products to a lane of 32
bits. The unsigned bytes are weights plus 128; a sum over a block starts at -128 times the sum of its inputs, which
undoes that. So sums of integers are exact. They are multiplied with both scales and added in float32, block by block.

Up to four rows share each load of three vectors of weights, [48 outputs, 4 inputs]. A row's result does not depend on
other rows. Twin in plain torch: `reference.int8_dynamic_product`. Cannot be compiled for other processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.jit import compile_for_bfloat16, kernel, lowering, prange
from fastgen.kernels.cpu.llvm_vectors import (
    F32,
    I32,
    I64,
    Emitter,
    call_intrinsic,
    emitted_by_count,
    spread_integer,
)
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, BYTES, TILE_LANES
from fastgen.kernels.cpu.matmul.quantise import HALVES, quantised

ROWS = 4  # per tile, at most
OFFSET = 128  # of the unsigned weights

_WIDTH = 16  # lanes of 32 bits
_VECTORS = TILE_LANES // _WIDTH

_INTEGERS = ir.VectorType(I32, _WIDTH)


def _emit_tile(
    rows: int, builder: Any, element: Any,
    inputs: Any, input_scales: Any, input_sums: Any, values: Any, scales: Any, blocks: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Compute out [rows, TILE_LANES] = quantised inputs [rows, blocks * BLOCK] times one group's weights.

    Arguments are addresses, but `blocks` and `out_stride`, which is in bytes.
    """
    emit = Emitter(builder, _WIDTH)
    totals = [emit.places(_VECTORS) for _ in range(rows)]
    input_stride, scale_stride = builder.mul(blocks, I64(BLOCK)), builder.mul(blocks, I64(4))
    sums_stride = builder.mul(blocks, I64(HALVES * 4))
    with lowering.for_range(builder, blocks) as step:
        block = step.index
        weights, first = emit.offset(values, block, BLOCK * TILE_LANES), emit.offset(inputs, block, BLOCK)
        sums = []
        for row in range(rows):
            place = emit.offset(emit.offset(input_sums, block, HALVES * 4), I64(row), sums_stride)
            halves = [emit.load(emit.offset(place, I64(half), 4), I32) for half in range(HALVES)]
            start = builder.mul(builder.add(*halves), I32(-OFFSET))
            sums.append([spread_integer(builder, start, _INTEGERS)] * _VECTORS)
        for turn in range(BLOCK // BYTES):
            vectors = [
                emit.load(emit.offset(weights, I64(turn * _VECTORS + vector), _WIDTH * 4), _INTEGERS)
                for vector in range(_VECTORS)
            ]
            for row in range(rows):
                place = builder.add(emit.offset(first, I64(row), input_stride), I64(turn * BYTES))
                four = spread_integer(builder, emit.load(place, I32), _INTEGERS)
                sums[row] = [
                    call_intrinsic(builder, "x86.avx512.vpdpbusd.512", _INTEGERS, total, vector, four)
                    for total, vector in zip(sums[row], vectors, strict=True)
                ]
        line = emit.offset(scales, block, TILE_LANES * 4)
        factors = [emit.load(emit.offset(line, I64(vector), _WIDTH * 4)) for vector in range(_VECTORS)]
        for row in range(rows):
            place = emit.offset(emit.offset(input_scales, block, 4), I64(row), scale_stride)
            scale = emit.spread(emit.load(place, F32))
            for total, integers, factor in zip(totals[row], sums[row], factors, strict=True):
                emit.add_product(total, builder.sitofp(integers, emit.floats), emit.multiply(factor, scale))
    size = element.bitwidth // 8
    for row in range(rows):
        line = emit.offset(out, I64(row), out_stride)
        for vector, total in enumerate(totals[row]):
            emit.store_elements(builder.load(total), emit.offset(line, I64(vector), _WIDTH * size), element)


_tile = emitted_by_count(_emit_tile)


@kernel("void(E[:,::1], u4[:,:,::1], f4[:,:,::1], E[:,::1])")
def multiply(
    x: ElementArray,
    values: npt.NDArray[np.uint32],
    scales: npt.NDArray[np.float32],
    out: ElementArray,
) -> None:
    """Compute out [T, groups * TILE_LANES] = x [T, in], quantised, times weights.

    Args:
        x, out: activations.
        values: [groups, blocks * BLOCK / BYTES, TILE_LANES], see `int8_layout.in_byte_groups`.
        scales: [groups, blocks, TILE_LANES], where blocks is in / BLOCK rounded up.
    """
    rows, blocks = x.shape[0], scales.shape[1]
    inputs, input_scales, sums = quantised(x, blocks)
    out_stride = out.shape[1] * out.itemsize
    for group in prange(values.shape[0]):
        w = values.ctypes.data + group * blocks * BLOCK * TILE_LANES
        s = scales.ctypes.data + group * blocks * TILE_LANES * 4
        for row in range(0, rows, ROWS):
            a = inputs.ctypes.data + row * blocks * BLOCK
            b, c = input_scales.ctypes.data + row * blocks * 4, sums.ctypes.data + row * blocks * HALVES * 4
            d = out.ctypes.data + row * out_stride + group * TILE_LANES * out.itemsize
            _tile(min(ROWS, rows - row), out, a, b, c, w, s, blocks, d, out_stride)


compile_for_bfloat16(multiply)
