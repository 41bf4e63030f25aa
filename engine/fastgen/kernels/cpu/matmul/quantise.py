"""Quantisation of a product's inputs to int8, with one scale for every `BLOCK` inputs of a row, and their sums.

Twin in plain torch: `reference.quantise`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.jit import inlined, prange, serial
from fastgen.kernels.cpu.llvm_vectors import F32, I32, I64, Emitter, all_lanes, call_intrinsic, emitted
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK

LARGEST = 127  # quantised input
HALVES = 2  # of a block, with a sum each
# Blocks whose largest input is below it become 0, because 127 divided by it overflows.
SMALLEST = float(np.float32(1e-36))

_WIDTH = BLOCK // HALVES
_SERIAL_BLOCKS = 1024  # this many are quantised by one thread: waking the others takes longer

_INTEGERS = ir.VectorType(I32, _WIDTH)


def _emit_quantise(builder: Any, element: Any, x: Any, quantised: Any, scale: Any, sums: Any) -> None:
    """Quantise `BLOCK` inputs to int8; write their scale, and the sums of the quantised halves.

    The scale of a block with infinity or NaN is not finite.
    """
    emit = Emitter(builder, _WIDTH)
    line = _WIDTH * element.bitwidth // 8
    halves = [emit.load_elements(emit.offset(x, I64(half), line), element) for half in range(HALVES)]
    # With the sign bit cleared, floats sort like their bit patterns, and NaN is the largest.
    without_sign = all_lanes(_INTEGERS, 0x7FFFFFFF)
    low, high = (builder.and_(builder.bitcast(half, _INTEGERS), without_sign) for half in halves)
    larger = builder.select(builder.icmp_signed(">", low, high), low, high)
    bits = call_intrinsic(builder, "vector.reduce.smax.v16i32", I32, larger)
    largest, steps = builder.bitcast(bits, F32), ir.Constant(F32, float(LARGEST))
    is_usable = builder.fcmp_ordered(">=", largest, ir.Constant(F32, SMALLEST))
    inverse = builder.select(is_usable, emit.divide(steps, largest), ir.Constant(F32, 0.0))
    emit.store(emit.divide(largest, steps), scale)
    for half, values in enumerate(halves):
        scaled = emit.multiply(values, emit.spread(inverse))
        rounded = call_intrinsic(builder, "rint.v16f32", emit.floats, scaled)  # ties to even
        # NaN becomes a number, because its conversion is undefined.
        integers = builder.fptosi(emit.larger(rounded, emit.constant(-LARGEST)), _INTEGERS)
        narrow = builder.trunc(integers, ir.VectorType(ir.IntType(8), _WIDTH))
        emit.store(narrow, emit.offset(quantised, I64(half), _WIDTH))
        total = call_intrinsic(builder, "vector.reduce.add.v16i32", I32, integers)
        emit.store(total, emit.offset(sums, I64(half), 4))


_quantise_block = emitted(_emit_quantise)


@serial
def quantise_row(
    x: ElementArray,
    row: int,
    quantised: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    sums: npt.NDArray[np.int32],
) -> None:
    """Quantise a row of x [T, in], padded with zeros to whole blocks.

    Its results are the row in quantised [T, blocks * BLOCK], scales [T, blocks] and sums [T, blocks, HALVES].
    """
    width, blocks = x.shape[1], scales.shape[1]
    whole = width // BLOCK
    source, target = x.ctypes.data + row * width * x.itemsize, quantised.ctypes.data + row * blocks * BLOCK
    scale, total = scales.ctypes.data + row * blocks * 4, sums.ctypes.data + row * blocks * HALVES * 4
    for block in range(whole):
        first = block * BLOCK
        place = total + block * HALVES * 4
        _quantise_block(x, source + first * x.itemsize, target + first, scale + block * 4, place)
    if whole < blocks:
        rest = np.zeros(BLOCK, x.dtype)
        for i in range(whole * BLOCK, width):
            rest[i - whole * BLOCK] = x[row, i]
        place = total + whole * HALVES * 4
        _quantise_block(x, rest.ctypes.data, target + whole * BLOCK, scale + whole * 4, place)


@inlined
def quantised(
    x: ElementArray, blocks: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Quantise the rows of x [T, in], padded with zeros to `blocks` blocks; results as in `quantise_row`."""
    rows = x.shape[0]
    integers = np.empty((rows, blocks * BLOCK), np.int8)
    scales, sums = np.empty((rows, blocks), np.float32), np.empty((rows, blocks, HALVES), np.int32)
    if rows * blocks <= _SERIAL_BLOCKS:
        for row in range(rows):
            quantise_row(x, row, integers, scales, sums)
    else:
        for row in prange(rows):
            quantise_row(x, row, integers, scales, sums)
    return integers, scales, sums
