"""Products of the output head, whose results are float32 in every format.

Rounded to bfloat16, neighbouring logits often become equal, and greedy decoding takes the smaller token id. The CPU's
product in bfloat16 is `bfloat16_linear.BFloat16Head`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.head import head_product


class TorchHead:
    """torch's product on any device.

    Args:
        weight: [vocabulary, hidden]; bfloat16, float16 or float32.
        bias: [vocabulary], or None.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        if self.weight.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        logits = head_product(x, self.weight)
        return logits if self.bias is None else logits.add_(self.bias)
