"""Memory layouts of the int8 kernels' matrices. Importing this compiles nothing."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.vector_width import CACHE_LINE

GROUP_LANES = 16  # outputs per group, of the kernel that widens weights
TILE_LANES = 48  # outputs per group, of the kernel that multiplies bytes: three vectors
BLOCK = 32  # inputs that share a scale
BYTES = 4  # inputs that one lane of a product of bytes sums

Scalar = TypeVar("Scalar", bound=np.generic)


def in_groups(matrix: npt.NDArray[Scalar], columns: int, lanes: int = GROUP_LANES) -> npt.NDArray[Scalar]:
    """Rearrange [rows, n], n <= columns, to [rows / lanes rounded up, columns, lanes], padded with zeros."""
    rows, given = matrix.shape
    whole = rows // lanes
    laid = _aligned_zeros((-(-rows // lanes), columns, lanes), matrix.dtype)
    laid[:whole, :given] = matrix[: whole * lanes].reshape(whole, lanes, given).swapaxes(1, 2)
    if whole < len(laid):
        rest = matrix[whole * lanes :]
        laid[whole, :given, : len(rest)] = rest.T
    return laid


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return zeros that begin at a cache line, so that no vector lies in two of them. numpy aligns to 16 bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return raw[first : first + size].view(dtype).reshape(shape)


def in_byte_groups(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint32]:
    """Rearrange weights [out, in] for products of bytes: [out / TILE_LANES, in / BYTES, TILE_LANES], both rounded up.

    An element holds the weights of one output and `BYTES` inputs, each plus 128. `in` is padded to whole blocks.
    Padding is not a weight of 0: the kernel multiplies it with inputs of 0, or its result is not used.
    """
    rows, given = values.shape
    columns = -(-given // BLOCK) * BLOCK
    raised = np.zeros((rows, columns), np.uint8)
    np.bitwise_xor(values.view(np.uint8), np.uint8(128), out=raised[:, :given])
    return in_groups(raised.view(np.uint32), columns // BYTES, TILE_LANES)
