"""Memory layout of the int8 kernel's matrices. Importing this compiles nothing."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

LANES = 16  # outputs per group
BLOCK = 32  # inputs that share a scale

Scalar = TypeVar("Scalar", bound=np.generic)


def in_groups(matrix: npt.NDArray[Scalar], columns: int) -> npt.NDArray[Scalar]:
    """Rearrange [rows, n], n <= columns, to [rows / LANES rounded up, columns, LANES], padded with zeros."""
    rows, given = matrix.shape
    whole = rows // LANES
    laid: npt.NDArray[Any] = np.zeros((-(-rows // LANES), columns, LANES), matrix.dtype)
    laid[:whole, :given] = matrix[: whole * LANES].reshape(whole, LANES, given).swapaxes(1, 2)
    if whole < len(laid):
        rest = matrix[whole * LANES :]
        laid[whole, :given, : len(rest)] = rest.T
    return laid
