"""Matrix products with weights that never change: packed once, used at every number of rows.

The project's own product is the default on every processor: its layout takes the weight's size, plus the padding of
less than one tile of columns. `FASTGEN_CPU_LINEAR` chooses torch's oneDNN product or the plain one instead. A oneDNN
packing made for 256 rows serves any number of rows, which is not documented: it is tried on every shape of the model
before it is used. MKL's packed product is left out: its packing reserves more than twice the weight's size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.config import ConfigError
from fastgen.kernels.cpu.vector_width import LANES
from fastgen.model.checkpoint.safetensors import Stored, Table
from fastgen.model.processor import LINEAR_CHOICES, LINEAR_VARIABLE, linear_choice

_PACKED_FOR_ROWS = 256
_TRIED_ROWS = (1, 2, 7, 16, 65, 129, 300)
# Of a weight as large as a head, which takes long and sees few rows.
_TRIED_ROWS_OF_LARGE = (1, 7, 65)
_LARGE = 10_000_000
# Of the largest value of a result: far above the noise of another order of summation, far below a wrong result.
_TOLERANCE = 1e-4


class Linear(Protocol):
    """y = x · weightᵀ for x [rows, in]; returns a new [rows, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""


class Placement(Protocol):
    """Brings weights to where, and into the form in which, a forward pass uses them."""

    def linear(self, parts: Sequence[Stored]) -> Linear:
        """The product with the matrices of `parts`, [out, in] each, one below the other."""

    def exact(self, part: Stored) -> Linear:
        """The product with a small matrix that decides much, such as a router: no more rounded than it is stored."""

    def table(self, part: Stored) -> Table:
        """A matrix whose rows are looked up."""

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Weights of a norm or a bias, in float32."""


class PlainLinear:
    """The product as torch does it without packing."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        return F.linear(x, self._weight)


class OneDNNLinear:
    """The product with a weight packed by oneDNN. The weight given is not kept."""

    __slots__ = ("_in_features", "_packed")

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._in_features = weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        assert x.dim() == 2
        assert x.shape[1] == self._in_features
        assert x.is_contiguous()
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return y


class TiledLinear:
    """The product with a weight laid out for the project's own kernel. The weight given is not kept."""

    __slots__ = ("_in_features", "_out_features", "_weights", "_width")

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        groups = -(-self._out_features // LANES)
        self._width = groups * LANES
        padded = F.pad(weight, (0, 0, 0, self._width - self._out_features))
        tiles = padded.view(groups, LANES, self._in_features).transpose(1, 2).contiguous()
        self._weights: npt.NDArray[np.float32] = tiles.numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        assert x.dim() == 2
        assert x.shape[1] == self._in_features
        assert x.is_contiguous()
        out = torch.empty(x.shape[0], self._width)
        _own_product()(x.numpy(), self._weights, out.numpy())
        return out if self._width == self._out_features else out[:, : self._out_features].contiguous()


class BiasedLinear:
    """A product and a bias [out]: every kind of product returns a new tensor, so it is added in place."""

    __slots__ = ("_bias", "_product")

    def __init__(self, product: Linear, bias: torch.Tensor) -> None:
        self._product = product
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product and adds the bias."""
        return self._product(x).add_(self._bias)


@cache
def _own_product() -> Callable[..., None]:
    """The kernel: it brings numba, which other devices do without, and is compiled while weights are laid out."""
    from fastgen.kernels.cpu.matmul import multiply

    return multiply


LinearKind = type[OneDNNLinear] | type[TiledLinear] | type[PlainLinear]

KINDS: dict[str, LinearKind] = dict(zip(LINEAR_CHOICES, (TiledLinear, OneDNNLinear, PlainLinear), strict=True))


class PackedPlacement:
    """Weights on the CPU in float32, packed for the chosen product.

    Raises:
        ConfigError: when the environment names a product that does not exist.
    """

    def __init__(self) -> None:
        self._kind = KINDS[linear_choice()]
        self._tried: set[torch.Size] = set()

    def linear(self, parts: Sequence[Stored]) -> Linear:
        """The packed product.

        Raises:
            ConfigError: when oneDNN's product is asked for and cannot be used.
        """
        weight = stacked(parts)
        if self._kind is OneDNNLinear and weight.shape not in self._tried:
            fault = packing_fault(self._kind, weight)
            if fault is not None:
                raise ConfigError(f"{LINEAR_VARIABLE}=onednn cannot be used here: {fault}; choose tiled or plain")
            self._tried.add(weight.shape)
        return self._kind(weight)

    def exact(self, part: Stored) -> Linear:
        """The packed product."""
        return self.linear([part])

    def table(self, part: Stored) -> Table:
        """As it is stored."""
        return part.table()

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return weight


def stacked(parts: Sequence[Stored]) -> torch.Tensor:
    """Matrices one below the other, float32."""
    return parts[0].float32() if len(parts) == 1 else torch.cat([part.float32() for part in parts])


def packing_fault(kind: LinearKind, weight: torch.Tensor) -> str | None:
    """What is wrong with such a product of this weight at several numbers of rows; None if nothing is."""
    try:
        packed = kind(weight)
        generator = torch.Generator().manual_seed(0)
        for rows in _TRIED_ROWS_OF_LARGE if weight.numel() > _LARGE else _TRIED_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=generator)
            expected = F.linear(x, weight)
            error = (packed(x) - expected).abs().max()
            if not error <= _TOLERANCE * expected.abs().max():
                return f"shape {tuple(weight.shape)} with {rows} rows: off by {error:.1e}"
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None
