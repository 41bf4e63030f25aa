"""Products of bfloat16 inputs with bfloat16 weights by the project's kernel for CPUs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.kernels.cpu.vector_width import TILE_COLUMNS

_PAIR = 2  # inputs in an element of 32 bits, see `kernels.cpu.matmul.bfloat16`


class BFloat16Linear:
    """The product with a bfloat16 weight [out, in], summed in float32.

    The original weight is not kept. A row's result does not depend on other rows.
    """

    results = torch.bfloat16

    __slots__ = ("_in_features", "_out_features", "_weights")

    def __init__(self, weight: torch.Tensor) -> None:
        assert weight.dtype == torch.bfloat16
        self._out_features, self._in_features = weight.shape
        groups = -(-self._out_features // TILE_COLUMNS)
        padding = groups * TILE_COLUMNS - self._out_features
        pairs = _in_pairs(F.pad(weight, (0, 0, 0, padding)) if padding else weight)
        tiles = pairs.view(groups, TILE_COLUMNS, -1).transpose(1, 2).contiguous()
        self._weights: npt.NDArray[np.uint32] = tiles.numpy().view(np.uint32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        # Imported late, because importing it compiles the kernel, which another process does during loading.
        from fastgen.kernels.cpu.matmul.bfloat16 import multiply

        assert x.dim() == 2
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self._in_features
        out = torch.empty(x.shape[0], len(self._weights) * TILE_COLUMNS, dtype=self.results)
        elements = out.view(torch.int16) if self.results == torch.bfloat16 else out
        multiply(_in_pairs(x.contiguous()).numpy().view(np.uint32), self._weights, elements.numpy())
        return out if out.shape[1] == self._out_features else out[:, : self._out_features].contiguous()


class BFloat16Head(BFloat16Linear):
    """The same product with results in float32, for the output head (`layers.head`)."""

    results = torch.float32

    __slots__ = ()


def _in_pairs(matrix: torch.Tensor) -> torch.Tensor:
    """View a bfloat16 matrix [n, in] as elements of 32 bits [n, in / 2], padded to whole ones."""
    padding = matrix.shape[1] % _PAIR
    return (F.pad(matrix, (0, padding)) if padding else matrix).view(torch.int32)
