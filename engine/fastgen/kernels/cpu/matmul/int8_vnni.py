"""Products of int8 weights with activations quantised to int8, on processors with AVX512-VNNI.

Activations are quantised in each product, with one scale for every `BLOCK` inputs of a row, as the weights have. The
instruction vpdpbusd multiplies 64 unsigned with 64 signed bytes and adds each four products to a lane of 32 bits. The
unsigned bytes are weights plus 128; a sum over a block starts at -128 times the sum of its inputs, which undoes that.
So sums of integers are exact. They are multiplied with both scales and added in float32, block by block.

Up to four rows share each load of three vectors of weights, [48 outputs, 4 inputs]. A row's result does not depend on
other rows. Twin in plain torch: `reference.int8_dynamic_product`. Cannot be compiled for other processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.jit import compile_for_bfloat16, kernel, lowering, prange, serial
from fastgen.kernels.cpu.llvm_vectors import F32, I32, I64, Emitter, emitted, emitted_by_count
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, BYTES, TILE_LANES

ROWS = 4  # per tile, at most
LARGEST = 127  # quantised input
OFFSET = 128  # of the unsigned weights
# Blocks whose largest input is below it become 0, because 127 divided by it overflows.
SMALLEST = float(np.float32(1e-36))

_WIDTH = 16  # lanes of 32 bits
_VECTORS = TILE_LANES // _WIDTH
_SERIAL_BLOCKS = 1024  # this many are quantised by one thread: waking the others takes longer

_I8 = ir.IntType(8)
_INTEGERS = ir.VectorType(I32, _WIDTH)


def _all(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * _WIDTH)


def _spread(builder: Any, integer: Any) -> Any:
    lane = builder.insert_element(ir.Constant(_INTEGERS, ir.Undefined), integer, I32(0))
    return builder.shuffle_vector(lane, lane, _all(0))


def _function(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return lowering.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _emit_quantise(builder: Any, element: Any, x: Any, quantised: Any, scale: Any, start: Any) -> None:
    """Quantise `BLOCK` inputs to int8; write their scale and the initial sum of their products.

    The scale of a block with infinity or NaN is not finite.
    """
    emit = Emitter(builder, _WIDTH)
    largest_of = _function(builder, "llvm.vector.reduce.smax.v16i32", I32, _INTEGERS)
    sum_of = _function(builder, "llvm.vector.reduce.add.v16i32", I32, _INTEGERS)
    nearest = _function(builder, "llvm.rint.v16f32", emit.floats, emit.floats)  # ties to even
    line = _WIDTH * element.bitwidth // 8
    halves = [emit.load_elements(emit.offset(x, I64(half), line), element) for half in range(BLOCK // _WIDTH)]
    # With the sign bit cleared, floats sort like their bit patterns, and NaN is the largest.
    low, high = (builder.and_(builder.bitcast(half, _INTEGERS), _all(0x7FFFFFFF)) for half in halves)
    bits = builder.call(largest_of, [builder.select(builder.icmp_signed(">", low, high), low, high)])
    largest, steps = builder.bitcast(bits, F32), ir.Constant(F32, float(LARGEST))
    is_usable = builder.fcmp_ordered(">=", largest, ir.Constant(F32, SMALLEST))
    inverse = builder.select(is_usable, emit.divide(steps, largest), ir.Constant(F32, 0.0))
    emit.store(emit.divide(largest, steps), scale)
    total = _all(0)
    for half, values in enumerate(halves):
        rounded = builder.call(nearest, [emit.multiply(values, emit.spread(inverse))])
        # NaN becomes a number, because its conversion is undefined.
        integers = builder.fptosi(emit.larger(rounded, emit.constant(-LARGEST)), _INTEGERS)
        emit.store(builder.trunc(integers, ir.VectorType(_I8, _WIDTH)), emit.offset(quantised, I64(half), _WIDTH))
        total = builder.add(total, integers)
    emit.store(builder.mul(builder.call(sum_of, [total]), I32(-OFFSET)), start)


_quantise_block = emitted(_emit_quantise)


@serial
def _quantise_row(
    x: ElementArray,
    row: int,
    quantised: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
) -> None:
    """Quantise a row of x [T, in] to that of quantised [T, blocks * BLOCK], and of scales and starts [T, blocks]."""
    width, blocks = x.shape[1], scales.shape[1]
    whole = width // BLOCK
    source, target = x.ctypes.data + row * width * x.itemsize, quantised.ctypes.data + row * blocks * BLOCK
    scale, start = scales.ctypes.data + row * blocks * 4, starts.ctypes.data + row * blocks * 4
    for block in range(whole):
        first = block * BLOCK
        _quantise_block(x, source + first * x.itemsize, target + first, scale + block * 4, start + block * 4)
    if whole < blocks:
        rest = np.zeros(BLOCK, x.dtype)
        for i in range(whole * BLOCK, width):
            rest[i - whole * BLOCK] = x[row, i]
        _quantise_block(x, rest.ctypes.data, target + whole * BLOCK, scale + whole * 4, start + whole * 4)


def _emit_tile(
    rows: int, builder: Any, element: Any,
    inputs: Any, input_scales: Any, starts: Any, values: Any, scales: Any, blocks: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """Compute out [rows, TILE_LANES] = quantised inputs [rows, blocks * BLOCK] times one group's weights.

    Arguments are addresses, but `blocks` and `out_stride`, which is in bytes.
    """
    emit = Emitter(builder, _WIDTH)
    multiply_bytes = _function(builder, "llvm.x86.avx512.vpdpbusd.512", _INTEGERS, *[_INTEGERS] * 3)
    totals = [emit.places(_VECTORS) for _ in range(rows)]
    input_stride, scale_stride = builder.mul(blocks, I64(BLOCK)), builder.mul(blocks, I64(4))
    with lowering.for_range(builder, blocks) as step:
        block = step.index
        weights, first = emit.offset(values, block, BLOCK * TILE_LANES), emit.offset(inputs, block, BLOCK)
        sums = []
        for row in range(rows):
            start = emit.load(emit.offset(emit.offset(starts, block, 4), I64(row), scale_stride), I32)
            sums.append([_spread(builder, start)] * _VECTORS)
        for turn in range(BLOCK // BYTES):
            vectors = [
                emit.load(emit.offset(weights, I64(turn * _VECTORS + vector), _WIDTH * 4), _INTEGERS)
                for vector in range(_VECTORS)
            ]
            for row in range(rows):
                place = builder.add(emit.offset(first, I64(row), input_stride), I64(turn * BYTES))
                four = _spread(builder, emit.load(place, I32))
                sums[row] = [
                    builder.call(multiply_bytes, [total, vector, four])
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
    inputs = np.empty((rows, blocks * BLOCK), np.int8)
    input_scales, starts = np.empty((rows, blocks), np.float32), np.empty((rows, blocks), np.int32)
    if rows * blocks <= _SERIAL_BLOCKS:
        for row in range(rows):
            _quantise_row(x, row, inputs, input_scales, starts)
    else:
        for row in prange(rows):
            _quantise_row(x, row, inputs, input_scales, starts)
    out_stride = out.shape[1] * out.itemsize
    for group in prange(values.shape[0]):
        w = values.ctypes.data + group * blocks * BLOCK * TILE_LANES
        s = scales.ctypes.data + group * blocks * TILE_LANES * 4
        for row in range(0, rows, ROWS):
            a = inputs.ctypes.data + row * blocks * BLOCK
            b, c = input_scales.ctypes.data + row * blocks * 4, starts.ctypes.data + row * blocks * 4
            d = out.ctypes.data + row * out_stride + group * TILE_LANES * out.itemsize
            _tile(min(ROWS, rows - row), out, a, b, c, w, s, blocks, d, out_stride)


compile_for_bfloat16(multiply)
