"""Matrix products with weights that never change: packed once for MKL, used at every number of rows.

torch has MKL's packed products as `torch.ops.mkl._mkl_linear`. A packing made for 256 rows serves any number of rows,
which MKL does not document: so it is tried on every shape of the model before it is trusted, and where it fails, or
where torch was built without MKL, the plain product takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F

log = logging.getLogger("fastgen.model")

_PACKED_FOR_ROWS = 256
_TRIED_ROWS = (1, 2, 7, 16, 65, 129, 300)
# Of the largest value of a result: far above the noise of another order of summation, far below a wrong result.
_TOLERANCE = 1e-4


class Linear(Protocol):
    """y = x · weightᵀ for x [rows, in]; returns a new [rows, out]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""


class PlainLinear:
    """The product as torch does it without packing."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        return F.linear(x, self._weight)


class PackedLinear:
    """The product with MKL's packed weight. The weight given is not kept."""

    __slots__ = ("_in_features", "_packed", "_shape_only")

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        # The op reads only the sizes of the original weight: one element, expanded, has them without the memory.
        self._shape_only = torch.empty(1).expand(weight.shape)
        self._in_features = weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product."""
        # With another rows argument, or strides it cannot use, the op would multiply by the stand-in without a word.
        assert x.dim() == 2
        assert x.shape[1] == self._in_features
        assert x.is_contiguous()
        y: torch.Tensor = torch.ops.mkl._mkl_linear.default(x, self._packed, self._shape_only, None, x.shape[0])
        return y


def choose_linear(samples: Iterable[torch.Tensor]) -> type[PackedLinear] | type[PlainLinear]:
    """The faster kind that is right on all `samples`, one weight of each distinct shape of the model."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        log.info("this torch build has no MKL: weights are not packed, passes are slower")
        return PlainLinear
    for weight in samples:
        fault = packing_fault(weight)
        if fault:
            log.warning("packed products are wrong here (%s): weights are not packed, passes are slower", fault)
            return PlainLinear
    return PackedLinear


def packing_fault(weight: torch.Tensor, row_counts: Iterable[int] = _TRIED_ROWS) -> str | None:
    """What is wrong with the packed product of this weight at the numbers of rows given; None if nothing is."""
    try:
        packed = PackedLinear(weight)
        generator = torch.Generator().manual_seed(0)
        for rows in row_counts:
            x = torch.randn(rows, weight.shape[1], generator=generator)
            expected = F.linear(x, weight)
            error = (packed(x) - expected).abs().max()
            if not error <= _TOLERANCE * expected.abs().max():
                return f"shape {tuple(weight.shape)} with {rows} rows: off by {error:.1e}"
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None
