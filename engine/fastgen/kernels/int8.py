"""Products with weights that are kept as int8 in memory, for any number of rows, on CPUs.

A weight [out, in] lies as groups of `LANES` outputs: int8 [groups, in, LANES], and for every `BLOCK` inputs a scale,
float32 [groups, in / BLOCK, LANES] (`int8_layout`). One load then gives an input's weights for a whole group: they
become float32 in registers, serve a tile of rows there, and are never written back. A decode reads a byte for a weight
instead of four.

The inner loop is written in LLVM's vectors, as numba keeps a small array of sums in memory, which takes several times
as long. LLVM makes of sixteen lanes what the processor has: two registers of AVX2, one of AVX-512. Twin in plain
torch: `reference.int8_product`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]

from fastgen.kernels.int8_layout import BLOCK, LANES
from fastgen.kernels.jit import intrinsic, kernel, lowering, prange, types

_STEPS = 4  # inputs in one turn of the inner loop
_REGISTERS_FOR_SUMS = 12  # of AVX2's sixteen: the others hold weights and an input

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _FLOATS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_F32, LANES)
_FIRST_LANE = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)


def _sums_of_a_row(rows: int) -> int:
    """How many sums a row has side by side: with few rows, one sum would wait for its own last addition."""
    features = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    registers = rows * (1 if "+avx512f" in features.split(",") else 2)
    sums = 1
    while sums < _STEPS and 2 * sums * registers <= _REGISTERS_FOR_SUMS:
        sums *= 2
    return sums


class _Emitter:
    """LLVM code of a tile's steps. Addresses are 64-bit integers, in bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        signature = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self._fused = lowering.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{LANES}f32")

    def offset(self, address: Any, count: Any, size: Any) -> Any:
        """address + count * size."""
        return self.builder.add(address, self.builder.mul(count, _I64(size) if isinstance(size, int) else size))

    def load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def store(self, values: Any, address: Any) -> None:
        self.builder.store(values, self.builder.inttoptr(address, _FLOATS.as_pointer()), align=1)

    def spread(self, scalar: Any) -> Any:
        """The scalar in all lanes."""
        lane = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, _I32(0))
        return self.builder.shuffle_vector(lane, lane, _FIRST_LANE)

    def add_product(self, place: Any, a: Any, b: Any) -> None:
        """*place += a * b."""
        self.builder.store(self.builder.call(self._fused, [a, b, self.builder.load(place)]), place)

    def zeros(self, count: int) -> list[Any]:
        """Places of sums; LLVM keeps them in registers."""
        return [lowering.alloca_once_value(self.builder, ir.Constant(_FLOATS, None)) for _ in range(count)]

    def total(self, places: Sequence[Any]) -> Any:
        parts = [self.builder.load(place) for place in places]
        while len(parts) > 1:
            parts = [self.builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]


def _emit_tile(rows: int, builder: Any, arguments: Sequence[Any]) -> None:
    """out [rows, LANES] = x [rows, blocks * BLOCK] times one group's weights."""
    x, x_stride, values, scales, blocks, out, out_stride = arguments
    emit = _Emitter(builder)
    chains = _sums_of_a_row(rows)
    totals, sums = emit.zeros(rows), [emit.zeros(chains) for _ in range(rows)]
    inputs = [emit.offset(x, _I64(row), x_stride) for row in range(rows)]
    with lowering.for_range(builder, blocks) as block:
        for place in (place for row in sums for place in row):
            builder.store(ir.Constant(_FLOATS, None), place)
        with lowering.for_range(builder, _I64(BLOCK // _STEPS)) as turn:
            first = emit.offset(builder.mul(block.index, _I64(BLOCK)), turn.index, _STEPS)
            for step in range(_STEPS):
                k = builder.add(first, _I64(step))
                weights = builder.sitofp(emit.load(emit.offset(values, k, LANES), _BYTES), _FLOATS)
                for row in range(rows):
                    scalar = emit.load(emit.offset(inputs[row], k, 4), _F32)
                    emit.add_product(sums[row][step % chains], emit.spread(scalar), weights)
        scale = emit.load(emit.offset(scales, block.index, LANES * 4), _FLOATS)
        for row in range(rows):
            emit.add_product(totals[row], emit.total(sums[row]), scale)
    for row in range(rows):
        emit.store(builder.load(totals[row]), emit.offset(out, _I64(row), out_stride))


def _tile(rows: int) -> Callable[[int, int, int, int, int, int, int], None]:
    """The tile of so many rows as a function for kernels: (x, x_stride, values, scales, blocks, out, out_stride)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Sequence[Any]) -> Any:
        _emit_tile(rows, builder, arguments)
        return context.get_dummy_value()

    def tile(
        _typing: Any, x: Any, x_stride: Any, values: Any, scales: Any, blocks: Any, out: Any, out_stride: Any
    ) -> Any:
        return types.void(x, x_stride, values, scales, blocks, out, out_stride), generate

    made: Callable[[int, int, int, int, int, int, int], None] = intrinsic(tile)
    return made


_tile_1, _tile_2, _tile_3, _tile_4, _tile_6 = _tile(1), _tile(2), _tile(3), _tile(4), _tile(6)


@kernel("void(f4[:,::1], i1[:,:,::1], f4[:,:,::1], f4[:,::1])")
def multiply(
    x: npt.NDArray[np.float32],
    values: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
) -> None:
    """out [T, groups * LANES] = x [T, in] times the weights [groups, in, LANES]; `in` is a multiple of BLOCK."""
    rows, blocks = x.shape[0], scales.shape[1]
    x_stride, out_stride = x.shape[1] * 4, out.shape[1] * 4
    for group in prange(values.shape[0]):
        w = values.ctypes.data + group * values.shape[1] * LANES
        s = scales.ctypes.data + group * blocks * LANES * 4
        row = 0
        while row < rows:
            a = x.ctypes.data + row * x_stride
            b = out.ctypes.data + row * out_stride + group * LANES * 4
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
