"""Products with float32 weights for any number of rows, on CPUs.

A weight [out, in] is stored as groups of `TILE_COLUMNS` outputs, [groups, in, TILE_COLUMNS]. The part of a group that
fits the L1 cache serves all rows before the next part is read, so weights are read from memory once.

A row's result does not depend on other rows: each sum has a fixed order. Twin in plain torch:
`torch.nn.functional.linear`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.jit import kernel, prange
from fastgen.kernels.cpu.llvm_vectors import emitted_by_count
from fastgen.kernels.cpu.matmul.tile import ROWS, emit_product
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS

FloatArray = npt.NDArray[np.float32]

_DEPTH = 256  # inputs per part: 24 KiB of weights with 256-bit vectors

_tile = emitted_by_count(emit_product)


@kernel("void(f4[:,::1], f4[:,:,::1], f4[:,::1])")
def multiply(x: FloatArray, weights: FloatArray, out: FloatArray) -> None:
    """Set out [T, groups * TILE_COLUMNS] = x [T, in] times the weights [groups, in, TILE_COLUMNS]."""
    rows, depth = x.shape
    x_row, out_row = depth * 4, out.shape[1] * 4
    for group in prange(weights.shape[0]):
        for first in range(0, depth, _DEPTH):
            size = min(_DEPTH, depth - first)
            part = weights.ctypes.data + (group * depth + first) * TILE_COLUMNS * 4
            for row in range(0, rows, ROWS):
                a = x.ctypes.data + row * x_row + first * 4
                c = out.ctypes.data + row * out_row + group * TILE_COLUMNS * 4
                _tile(min(ROWS, rows - row), a, x_row, 4, part, size, c, out_row, first)
