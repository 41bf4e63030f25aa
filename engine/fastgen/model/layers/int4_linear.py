"""Products with weights that stay 4-bit integers, on GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from fastgen.kernels.gpu.int4 import BLOCK, dequantised, int4_product, packed_integers
from fastgen.model.checkpoint.checkpoint import Readable, StoredTensor
from fastgen.model.checkpoint.gguf import GGUFTensor
from fastgen.model.checkpoint.packed_blocks import PackedBlocks
from fastgen.model.checkpoint.quantized.weight import QuantizedIntegers, QuantizedTensor


class Int4Linear:
    """The product of activations in bfloat16 or float16 with a weight of 4-bit integers.

    Args:
        packed, scales, offsets: as `int4_product` takes them.
        order: the inputs that the weight's columns belong to, int64 [in]; None if they are in order.
    """

    __slots__ = ("_offsets", "_order", "_packed", "_scales")

    def __init__(
        self, packed: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None
    ) -> None:
        self._packed, self._scales, self._offsets, self._order = packed, scales, offsets, order

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self._packed.nbytes + self._scales.nbytes + self._offsets.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product, in two launches, or three with another order of columns."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        return int4_product(x, self._packed, self._scales, self._offsets)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`, its columns in order."""
        weight = dequantised(self._packed, self._scales, self._offsets).to(dtype)
        return weight if self._order is None else weight.index_select(1, self._order.argsort())


class Int4Rows(Readable, Protocol):
    """Rows of 4-bit integers as `int4_product` takes them: the values are uint8 [rows, columns / 2]."""

    @property
    def num_groups(self) -> int:
        """Groups of a row, each with the same number of columns, a multiple of 32."""

    @property
    def order(self) -> torch.Tensor | None:
        """As in `Int4Linear`: columns by their group."""

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the offsets, float32 [rows, groups]."""


class _IntegerRows(QuantizedTensor):
    """Implements `Int4Rows` for a weight of a Hugging Face checkpoint, if it `fits`."""

    weight: QuantizedIntegers

    def __init__(self, part: QuantizedTensor, weight: QuantizedIntegers) -> None:
        super().__init__(weight, part.first, (part.shape[0], part.shape[1] // 2), part.selected)
        columns, groups = weight.shape[-1], weight.scales(0, 1)[0].shape[1]
        group_of = weight.group_of()
        self.order = None if group_of is None else group_of.argsort(stable=True)
        self._size, rest = divmod(columns, groups)
        in_order = group_of is None or bool((group_of.bincount(minlength=groups) == self._size).all())
        if part.selected is not None:  # a rank's columns, which may cut groups
            in_order = group_of is None
            self._size = math.gcd(part.selected.start, part.selected.stop, self._size)
        self.fits = not rest and in_order and self._size % BLOCK == 0
        self._chosen = range(columns) if part.selected is None else part.selected
        self._groups = torch.arange(self._chosen.start, self._chosen.stop, self._size) * groups // columns
        self.num_groups = len(self._groups)

    def values(self) -> torch.Tensor:
        """Read the packed integers."""
        integers = self.weight.integers(self.first, self.shape[0])
        if self.order is not None:
            return packed_integers(integers.index_select(1, self.order))
        return packed_integers(integers[:, self._chosen.start : self._chosen.stop])

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the offsets."""
        scales, zeros = self.weight.scales(self.first, self.shape[0])
        offsets = torch.zeros_like(scales) if zeros is None else -scales * zeros
        return scales.index_select(1, self._groups), offsets.index_select(1, self._groups)


class _GGUFRows:
    """Implements `Int4Rows` for a weight of a GGUF file."""

    order = None

    def __init__(self, part: GGUFTensor) -> None:
        self._part = part
        rows, columns = part.shape
        self.shape, self.num_groups = (rows, columns // 2), columns // BLOCK

    def values(self) -> torch.Tensor:
        """Read the packed integers."""
        return packed_integers(torch.from_numpy(self._blocks().values))

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the offsets."""
        scales, offsets = self._blocks().scales_and_offsets()
        return torch.from_numpy(scales), torch.from_numpy(offsets)

    def _blocks(self) -> PackedBlocks:
        blocks = self._part.blocks()
        assert isinstance(blocks, PackedBlocks)
        return blocks


def int4_rows(parts: Sequence[StoredTensor], dtype: torch.dtype) -> list[Int4Rows] | None:
    """Return the parts as `Int4Linear` takes them; None if the parts or the dtype do not allow it.

    The parts must have the same groups in the same order, because their product is one.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    found = [rows for part in parts if (rows := _rows(part)) is not None]
    if len(found) < len(parts):
        return None
    first = found[0]
    same = all(rows.num_groups == first.num_groups and _equal(rows.order, first.order) for rows in found)
    return found if same else None


def _rows(part: StoredTensor) -> Int4Rows | None:
    if isinstance(part, GGUFTensor):
        return _GGUFRows(part) if part.has_four_bits else None
    if not isinstance(part, QuantizedTensor) or not isinstance(part.weight, QuantizedIntegers):
        return None
    if part.weight.bits != 4:
        return None
    rows = _IntegerRows(part, part.weight)
    return rows if rows.fits else None


def _equal(order: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return torch.equal(order, other)
