"""Matrix products with constant weights: packed once, used for any number of rows.

In float32 the project's kernel is the default on every processor: its layout takes the weight's size plus padding of
less than one tile of columns. In bfloat16 oneDNN's packed product is the default, because it uses AMX and is faster for
many rows; the project's, with which a row's result does not depend on other rows, serves the head and --deterministic.
`FASTGEN_CPU_LINEAR` selects another one. A oneDNN packing made for 256 rows serves any number of rows, which is
undocumented, so it is tested on every shape of the model before use. MKL's packed product is not offered: its packing
reserves more than twice the weight's size.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from fastgen.model import first_line
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, Readable, StoredTensor
from fastgen.model.layers.bfloat16_linear import BFloat16Head, BFloat16Linear
from fastgen.model.processor import LINEAR_CHOICES, LINEAR_VARIABLE, linear_choice
from fastgen.settings import ConfigError

log = logging.getLogger("fastgen.model")

_PACKED_FOR_ROWS = 256
_TESTED_ROWS = (1, 2, 7, 16, 65, 129, 300)
# For weights as large as a head, which take long and are used for few rows.
_TESTED_ROWS_OF_LARGE = (1, 7, 65)
_LARGE = 10_000_000
# Relative to the largest result: above rounding by another order of summation, or to bfloat16 (half its last place is
# 2e-3), and far below a wrong result.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
# oneDNN generates code for each number of rows, and keeps a limited number of versions (`environment.prepare`). From
# this number on, rows are padded to a multiple of it; below it, to a power of two.
_ROWS_STEP = 16


class Linear(Protocol):
    """y = x · weightᵀ for x [rows, in]; returns a new [rows, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""


class WeightFormat(ABC):
    """Places weights in the format that the forward pass uses; by default, on the CPU.

    Attributes:
        block: columns of a matrix that are quantised together; a rank should hold whole blocks.
    """

    block = 1

    def placing(self) -> AbstractContextManager[object]:
        """Return the context in which to place weights: at its end, all are in place."""
        return nullcontext()

    @abstractmethod
    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the product with the concatenated matrices of `parts`, [out, in] each."""

    @abstractmethod
    def head(self, part: StoredTensor) -> Linear:
        """Return the product with the output head, whose results are float32 (`layers.head`)."""

    def exact(self, part: StoredTensor) -> Linear:
        """Return the product with a small, sensitive matrix such as a router, which must not be quantised."""
        return self.linear([part])

    def float32(self, matrix: torch.Tensor) -> Linear:
        """Return the product in float32 with a float32 matrix, whatever the type of activations."""
        return FloatLinear(self.vector(matrix))

    def table(self, part: StoredTensor) -> EmbeddingTable:
        """Return an embedding table."""
        return part.table()

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights of a norm or a bias in float32."""
        return weight

    def experts(self, mlps: tuple[Any, ...]) -> Any:
        """Return the experts of a mixture, given an `MLP` for each, as the backend's `mixture` takes them."""
        return mlps


def padded_rows(rows: int) -> int:
    """Return `rows`, rounded up to a number for which oneDNN's code is kept."""
    return -(-rows // _ROWS_STEP) * _ROWS_STEP if rows > _ROWS_STEP else 1 << (rows - 1).bit_length()


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array of kernel elements (`kernels.cpu.elements`), without copying it."""
    array: npt.NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


class PlainLinear:
    """torch's product without packing."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return F.linear(x, self.weight)


class FloatLinear:
    """torch's product in float32, whatever the type of activations: [n, in] -> [n, out] float32."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return F.linear(x.float(), self.weight)


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
        rows = len(x)
        padding = padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, None, "none", [], "")
        return y[:rows] if padding else y


class TiledLinear:
    """The product with a weight in the layout of the project's kernel. The original weight is not kept."""

    __slots__ = ("_in_features", "_out_features", "_weights", "_width")

    def __init__(self, weight: torch.Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        groups = -(-self._out_features // TILE_COLUMNS)
        self._width = groups * TILE_COLUMNS
        padded = F.pad(weight, (0, 0, 0, self._width - self._out_features))
        tiles = padded.view(groups, TILE_COLUMNS, self._in_features).transpose(1, 2).contiguous()
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

    __slots__ = ("bias", "product")

    def __init__(self, product: Linear, bias: torch.Tensor) -> None:
        self.product = product
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product and add the bias."""
        return self.product(x).add_(self.bias)


class WidenedLinear:
    """A product that takes float32 inputs and so returns float32 results, for inputs in bfloat16."""

    __slots__ = ("product",)

    def __init__(self, product: Linear) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return self.product(x.float())


@cache
def _tiled_kernel() -> Callable[..., None]:
    """Import the kernel on first use and return it.

    Other devices do not need numba, which it imports, and another process compiles it while weights are loaded.
    """
    from fastgen.kernels.cpu.matmul.float32 import multiply

    return multiply


LinearKind = type[OneDNNLinear] | type[TiledLinear] | type[BFloat16Linear] | type[PlainLinear]

KINDS: dict[str, LinearKind] = dict(zip(LINEAR_CHOICES, (TiledLinear, OneDNNLinear, PlainLinear), strict=True))


class PackedFormat(WeightFormat):
    """Weights on the CPU in float32 or bfloat16, packed for the selected product.

    Args:
        dtype: of weights and activations.
        choice: the product, one of `LINEAR_CHOICES`; None for `linear_choice`.

    Attributes:
        pads_rows: whether a step should pad its rows once, as `padded_rows`, so that its products need not.

    Raises:
        ConfigError: if the environment names an unknown product.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, choice: str | None = None) -> None:
        self._dtype = dtype
        self._kind = KINDS[choice or linear_choice(str(dtype).removeprefix("torch."))]
        if self._kind is TiledLinear and dtype == torch.bfloat16:
            self._kind = BFloat16Linear
        self._tried: set[torch.Size] = set()
        self.pads_rows = dtype == torch.bfloat16 and self._kind is not BFloat16Linear

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the packed product.

        If oneDNN fails or gives wrong results for this shape, use another product from here on, with a warning: in
        bfloat16 the project's, which computes in float32 where the processor has no bfloat16; otherwise torch's.

        Raises:
            ConfigError: instead, if the environment selects oneDNN.
        """
        weight = stacked(parts, self._dtype)
        if self._kind is OneDNNLinear and weight.shape not in self._tried:
            fault = packing_fault(self._kind, weight)
            if fault is not None and os.environ.get(LINEAR_VARIABLE):
                raise ConfigError(f"{LINEAR_VARIABLE}=onednn cannot be used here: {fault}; choose tiled or plain")
            if fault is not None:
                is_rounded = self._dtype == torch.bfloat16
                self._kind, name = (BFloat16Linear, "tiled") if is_rounded else (PlainLinear, "plain, which is slow")
                self.pads_rows = False
                log.warning("%s product %s: onednn cannot be used here: %s", self._dtype, name, fault)
            self._tried.add(weight.shape)
        return self._kind(weight)

    def head(self, part: StoredTensor) -> Linear:
        """Return the packed product; in bfloat16 always the project's, because torch has none with float32 results."""
        return BFloat16Head(stacked([part], self._dtype)) if self._dtype == torch.bfloat16 else self.linear([part])

    def float32(self, matrix: torch.Tensor) -> Linear:
        """Return the project's product, with which a row's result does not depend on other rows."""
        return WidenedLinear(TiledLinear(matrix))


def stacked(parts: Sequence[Readable], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate the rows of matrices, converted from their stored types to `dtype`."""
    stored = [part.values() for part in parts]
    matrices = [values.to(dtype) for values in stored]
    if len(matrices) > 1:
        return torch.cat(matrices)
    # Pages of a mapped file may be evicted, and a step must not wait for the disk.
    return matrices[0].clone() if matrices[0] is stored[0] else matrices[0]


def packing_fault(kind: LinearKind, weight: torch.Tensor) -> str | None:
    """Test a product with this weight for several numbers of rows.

    Return the error, or None if the product is right.
    """
    wide, tolerance = weight.float(), _TOLERANCE[weight.dtype]
    try:
        packed = kind(weight)
        generator = torch.Generator().manual_seed(0)
        for rows in _TESTED_ROWS_OF_LARGE if weight.numel() > _LARGE else _TESTED_ROWS:
            x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
            expected = F.linear(x.float(), wide)
            error = (packed(x).float() - expected).abs().max()
            if not error <= tolerance * expected.abs().max():
                return f"shape {tuple(weight.shape)} with {rows} rows: off by {error:.1e}"
    except (RuntimeError, AttributeError) as error:
        return first_line(error)
    return None
