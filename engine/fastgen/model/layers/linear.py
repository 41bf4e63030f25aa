"""Matrix products with constant weights: packed once, used for any number of rows.

The project's kernel is the default on every processor: its layout takes the weight's size plus padding of less than one
tile of columns. `FASTGEN_CPU_LINEAR` selects torch's oneDNN product or the plain one instead. A oneDNN packing made for
256 rows serves any number of rows, which is undocumented, so it is tested on every shape of the model before use. MKL's
packed product is not offered: its packing reserves more than twice the weight's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.config import ConfigError
from fastgen.kernels.cpu.vector_width import LANES
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, StoredTensor
from fastgen.model.processor import LINEAR_CHOICES, LINEAR_VARIABLE, linear_choice

_PACKED_FOR_ROWS = 256
_TESTED_ROWS = (1, 2, 7, 16, 65, 129, 300)
# For weights as large as a head, which take long and are used for few rows.
_TESTED_ROWS_OF_LARGE = (1, 7, 65)
_LARGE = 10_000_000
# Relative to the largest result: far above rounding by another order of summation, far below a wrong result.
_TOLERANCE = 1e-4


class Linear(Protocol):
    """y = x · weightᵀ for x [rows, in]; returns a new [rows, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""


class WeightFormat(Protocol):
    """Places weights on a device in the format that the forward pass uses."""

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the product with the concatenated matrices of `parts`, [out, in] each."""

    def exact(self, part: StoredTensor) -> Linear:
        """Return the product with a small, sensitive matrix such as a router, which must not be quantised."""

    def table(self, part: StoredTensor) -> EmbeddingTable:
        """Return an embedding table."""

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights of a norm or a bias in float32."""

    def experts(self, mlps: tuple[Any, ...]) -> Any:
        """Return the experts of a mixture, an `MLP` each, as the backend's `mixture` takes them."""


class PlainLinear:
    """torch's product without packing."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return F.linear(x, self.weight)


class OneDNNLinear:
    """The product with a weight packed by oneDNN. The original weight is not kept."""

    __slots__ = ("_in_features", "_packed")

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._in_features = weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        assert x.dim() == 2
        assert x.shape[1] == self._in_features
        assert x.is_contiguous()
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return y


class TiledLinear:
    """The product with a weight in the layout of the project's kernel. The original weight is not kept."""

    __slots__ = ("_in_features", "_out_features", "_weights", "_width")

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        groups = -(-self._out_features // LANES)
        self._width = groups * LANES
        padded = F.pad(weight, (0, 0, 0, self._width - self._out_features))
        tiles = padded.view(groups, LANES, self._in_features).transpose(1, 2).contiguous()
        self._weights: npt.NDArray[np.float32] = tiles.numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        assert x.dim() == 2
        assert x.shape[1] == self._in_features
        assert x.is_contiguous()
        out = torch.empty(x.shape[0], self._width)
        _tiled_kernel()(x.numpy(), self._weights, out.numpy())
        return out if self._width == self._out_features else out[:, : self._out_features].contiguous()


class BiasedLinear:
    """A product plus a bias [out], which is added in place because every product returns a new tensor."""

    __slots__ = ("_bias", "_product")

    def __init__(self, product: Linear, bias: torch.Tensor) -> None:
        self._product = product
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product and add the bias."""
        return self._product(x).add_(self._bias)


@cache
def _tiled_kernel() -> Callable[..., None]:
    """Import the kernel late: it needs numba, which other devices do not, and is compiled while weights are loaded."""
    from fastgen.kernels.cpu.matmul import multiply

    return multiply


LinearKind = type[OneDNNLinear] | type[TiledLinear] | type[PlainLinear]

KINDS: dict[str, LinearKind] = dict(zip(LINEAR_CHOICES, (TiledLinear, OneDNNLinear, PlainLinear), strict=True))


class PackedFormat:
    """Float32 weights on the CPU, packed for the selected product.

    Raises:
        ConfigError: if the environment names an unknown product.
    """

    def __init__(self) -> None:
        self._kind = KINDS[linear_choice()]
        self._tried: set[torch.Size] = set()

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the packed product.

        Raises:
            ConfigError: if oneDNN is selected and gives wrong results.
        """
        weight = stacked(parts)
        if self._kind is OneDNNLinear and weight.shape not in self._tried:
            fault = packing_fault(self._kind, weight)
            if fault is not None:
                raise ConfigError(f"{LINEAR_VARIABLE}=onednn cannot be used here: {fault}; choose tiled or plain")
            self._tried.add(weight.shape)
        return self._kind(weight)

    def exact(self, part: StoredTensor) -> Linear:
        """Return the packed product."""
        return self.linear([part])

    def table(self, part: StoredTensor) -> EmbeddingTable:
        """Return the table in its stored format."""
        return part.table()

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights unchanged."""
        return weight

    def experts(self, mlps: tuple[Any, ...]) -> Any:
        """Return the experts as they are."""
        return mlps


def stacked(parts: Sequence[StoredTensor]) -> torch.Tensor:
    """Concatenate the rows of matrices, in float32."""
    return parts[0].float32() if len(parts) == 1 else torch.cat([part.float32() for part in parts])


def packing_fault(kind: LinearKind, weight: torch.Tensor) -> str | None:
    """Test a product with this weight for several numbers of rows; return the error, or None if it is right."""
    try:
        packed = kind(weight)
        generator = torch.Generator().manual_seed(0)
        for rows in _TESTED_ROWS_OF_LARGE if weight.numel() > _LARGE else _TESTED_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=generator)
            expected = F.linear(x, weight)
            error = (packed(x) - expected).abs().max()
            if not error <= _TOLERANCE * expected.abs().max():
                return f"shape {tuple(weight.shape)} with {rows} rows: off by {error:.1e}"
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None
