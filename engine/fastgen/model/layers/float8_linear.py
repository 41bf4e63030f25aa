"""Products with weights that stay in float8, on GPUs with units for it.

Activations are quantised with a scale for each row; a weight has one for each output. The product is torch's
`scaled_mm`, which runs on CPUs too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType, scaled_mm

from fastgen.kernels.gpu.float8 import quantise_rows
from fastgen.model.checkpoint.checkpoint import StoredTensor
from fastgen.model.checkpoint.quantized.float8 import Float8Rows

_FLOAT8_CAPABILITY = (8, 9)
_ALIGNMENT = 16  # of rows and columns, for cuBLAS


class Float8Linear:
    """The product of activations in bfloat16 with a weight in float8.

    Args:
        weight: float8_e4m3fn [out, in], both multiples of 16.
        scales: float32 [out], of the rows of the weight.
    """

    __slots__ = ("_scales", "_weight")

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        self._weight = weight
        self._scales = scales[None]

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self._weight.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product, in two launches."""
        values, scales = quantise_rows(x)
        by_row = ScalingType.RowWise
        return scaled_mm(values, self._weight.t(), scales, by_row, self._scales, by_row, output_dtype=x.dtype)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        return (self._weight.float() * self._scales.t()).to(dtype)


def float8_rows(parts: Sequence[StoredTensor], device: torch.device, dtype: torch.dtype) -> list[Float8Rows] | None:
    """Return the parts as `Float8Linear` takes them; None if the parts, the device or the dtype do not allow it."""
    found = [rows for part in parts if (rows := Float8Rows.of(part)) is not None]
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if len(found) < len(parts) or dtype != torch.bfloat16 or any(size % _ALIGNMENT for size in shape):
        return None
    return found if has_float8_units(device) else None


def has_float8_units(device: torch.device) -> bool:
    """Return whether a device multiplies float8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY
