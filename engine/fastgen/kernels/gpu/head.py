"""Operator of the output head's product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.operators import library_operator

_ROWS_AT_A_TIME = 4096  # of the weight, which the CPU widens


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch the product of cuBLAS that writes its float32 sums."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


@library_operator(_multiply)
def head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply 16-bit hidden states with the head's weight in one launch, without rounding the logits.

    torch has no such product for CPUs.

    Args:
        x: [R, hidden], bfloat16 or float16.
        weight: [vocabulary, hidden] in the same dtype.

    Returns:
        [R, vocabulary] in float32.
    """
    wide, parts = x.float(), torch.split(weight, _ROWS_AT_A_TIME)
    return torch.cat([F.linear(wide, part.float()) for part in parts], 1)
