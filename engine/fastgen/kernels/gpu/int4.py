"""Operator of products with weights of 4-bit integers, in groups of columns with a scale and an offset.

Source: products that dequantise weights in registers, Frantar et al. (2022); sums split over the depth, Osama et al.
(2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.operators import operator

BLOCK = 32  # columns whose integers are packed together; groups are multiples of it
HALF = BLOCK // 2


@operator()
def int4_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply with a weight of 4-bit integers, in two launches.

    Up to 64 rows are multiplied as the integers are read. For more, the weight is dequantised first, so that it is read
    twice more, in x's dtype.

    Args:
        x: [T, K], contiguous; bfloat16 or float16.
        packed: uint8 [N, K / 2], see `packed_integers`.
        scales, offsets: float32 [N, groups]. A weight is its integer times the scale plus the offset of its group,
            rounded to x's dtype. A group has K / groups columns, a multiple of 32.

    Returns:
        [T, N] in x's dtype. Products are added in float32.
    """
    return F.linear(x, dequantised(packed, scales, offsets).to(x.dtype))


def packed_integers(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers from 0 to 15 [N, K] to uint8 [N, K / 2].

    The byte 16 i + j has column 32 i + j in its lower bits, and column 32 i + 16 + j in its upper bits, as in GGUF's
    Q4_0: so a kernel multiplies the lower and the upper bits of neighbouring bytes with neighbouring inputs.
    """
    blocks = integers.to(torch.uint8).unflatten(1, (-1, 2, HALF))  # type: ignore[no-untyped-call]
    packed: torch.Tensor = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)
    return packed


def dequantised(packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the weight [N, K] in float32; arguments as of `int4_product`."""
    blocks = packed.unflatten(1, (-1, HALF))  # type: ignore[no-untyped-call]
    integers = torch.stack((blocks & 15, blocks >> 4), 2).flatten(1).float()
    groups = integers.unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
    values: torch.Tensor = (groups * scales[:, :, None] + offsets[:, :, None]).flatten(1)
    return values
