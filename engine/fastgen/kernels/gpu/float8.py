"""Operators of products with weights in float8.

Source: dynamic scales for each token, Xiao et al. (2022).
"""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.operators import operator

LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


@operator()
def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to float8 with a scale of its own, in one launch.

    Args:
        x: [T, K], contiguous; bfloat16, float16 or float32.

    Returns:
        values [T, K] float8_e4m3fn, and scales [T, 1] float32, such that the largest absolute value of a row becomes
        448. The scale of a row of zeros is 0; a row with infinity or NaN becomes NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, LARGEST_FLOAT8 / largest)
    values = (wide * inverse).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    return values, largest / LARGEST_FLOAT8
