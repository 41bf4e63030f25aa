"""Products with int8 weights for any number of rows, on CPUs.

A weight [out, in] is stored as groups of `GROUP_LANES` outputs: int8 [groups, in, GROUP_LANES], and a scale for every
`BLOCK` inputs, float32 [groups, in / BLOCK, GROUP_LANES] (`int8_layout`). One load reads an input's weights for a whole
group. They are converted to float32 in registers and used for a tile of rows. A decode reads one byte per weight
instead of four.

The inner loop uses LLVM vectors of sixteen lanes: two registers of AVX2, one of AVX-512. Twin in plain torch:
`reference.int8_product`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.jit import kernel, lowering, prange
from fastgen.kernels.cpu.llvm_vectors import F32, I64, Emitter, emitted
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, GROUP_LANES
from fastgen.kernels.cpu.vector_width import has_wide_vectors

_STEPS = 4  # inputs per iteration of the inner loop
_REGISTERS_FOR_SUMS = 12  # of AVX2's sixteen; the others hold weights and an input

_BYTES = ir.VectorType(ir.IntType(8), GROUP_LANES)


def _sums_of_a_row(rows: int) -> int:
    """Return the number of parallel sums per row: with few rows, a single sum is bound by the latency of additions."""
    registers = rows * (1 if has_wide_vectors() else 2)
    sums = 1
    while sums < _STEPS and 2 * sums * registers <= _REGISTERS_FOR_SUMS:
        sums *= 2
    return sums


def _total(emit: Emitter, places: Sequence[Any]) -> Any:
    parts = [emit.builder.load(place) for place in places]
    while len(parts) > 1:
        parts = [emit.add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _emit_tile(
    rows: int, builder: Any, x: Any, x_stride: Any, values: Any, scales: Any, blocks: Any, out: Any, out_stride: Any
) -> None:
    """Compute out [rows, GROUP_LANES] = x [rows, blocks * BLOCK] times one group's weights."""
    emit = Emitter(builder, GROUP_LANES)
    chains = _sums_of_a_row(rows)
    totals, sums = emit.places(rows), [emit.places(chains) for _ in range(rows)]
    inputs = [emit.offset(x, I64(row), x_stride) for row in range(rows)]
    with lowering.for_range(builder, blocks) as block:
        for place in (place for row in sums for place in row):
            builder.store(emit.zero, place)
        with lowering.for_range(builder, I64(BLOCK // _STEPS)) as turn:
            first = emit.offset(builder.mul(block.index, I64(BLOCK)), turn.index, _STEPS)
            for step in range(_STEPS):
                k = builder.add(first, I64(step))
                weights = builder.sitofp(emit.load(emit.offset(values, k, GROUP_LANES), _BYTES), emit.floats)
                for row in range(rows):
                    scalar = emit.load(emit.offset(inputs[row], k, 4), F32)
                    emit.add_product(sums[row][step % chains], emit.spread(scalar), weights)
        scale = emit.load(emit.offset(scales, block.index, GROUP_LANES * 4))
        for row in range(rows):
            emit.add_product(totals[row], _total(emit, sums[row]), scale)
    for row in range(rows):
        emit.store(builder.load(totals[row]), emit.offset(out, I64(row), out_stride))


_tile_1, _tile_2, _tile_3, _tile_4, _tile_6 = (emitted(partial(_emit_tile, rows)) for rows in (1, 2, 3, 4, 6))


@kernel("void(f4[:,::1], i1[:,:,::1], f4[:,:,::1], f4[:,::1])")
def multiply(
    x: npt.NDArray[np.float32],
    values: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
) -> None:
    """Compute out [T, groups * GROUP_LANES] = x [T, in] times weights [groups, in, GROUP_LANES].

    `in` is a multiple of `BLOCK`.
    """
    rows, blocks = x.shape[0], scales.shape[1]
    x_stride, out_stride = x.shape[1] * 4, out.shape[1] * 4
    for group in prange(values.shape[0]):
        w = values.ctypes.data + group * values.shape[1] * GROUP_LANES
        s = scales.ctypes.data + group * blocks * GROUP_LANES * 4
        row = 0
        while row < rows:
            a = x.ctypes.data + row * x_stride
            b = out.ctypes.data + row * out_stride + group * GROUP_LANES * 4
            left = rows - row
            if left >= 6:
                _tile_6(a, x_stride, w, s, blocks, b, out_stride)
                row += 6
            elif left >= 4:
                _tile_4(a, x_stride, w, s, blocks, b, out_stride)
                row += 4
            elif left == 3:
                _tile_3(a, x_stride, w, s, blocks, b, out_stride)
                row += 3
            elif left == 2:
                _tile_2(a, x_stride, w, s, blocks, b, out_stride)
                row += 2
            else:
                _tile_1(a, x_stride, w, s, blocks, b, out_stride)
                row += 1
