"""How the int8 kernel wants a matrix to lie. Importing this compiles nothing."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

LANES = 16  # outputs of a group
BLOCK = 32  # inputs that share a scale

Scalar = TypeVar("Scalar", bound=np.generic)


def in_groups(matrix: npt.NDArray[Scalar], columns: int) -> npt.NDArray[Scalar]:
    """[rows, n] -> [rows / LANES rounded up, columns, LANES], what is missing filled with zeros; n <= columns."""
    rows, given = matrix.shape
    whole = rows // LANES
    laid: npt.NDArray[Any] = np.zeros((-(-rows // LANES), columns, LANES), matrix.dtype)
    laid[:whole, :given] = matrix[: whole * LANES].reshape(whole, LANES, given).swapaxes(1, 2)
    if whole < len(laid):
        rest = matrix[whole * LANES :]
        laid[whole, :given, : len(rest)] = rest.T
    return laid
