"""Products with matrices that stay in the blocks of a few bits in which the checkpoint stores them.

Each product quantises its activations to int8, with one scale for every 32 inputs of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kernels.cpu.matmul.int8_layout import TILE_LANES, in_groups
from fastgen.kernels.cpu.matmul.packed_layout import in_word_groups, unpacked
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, StoredBlocks, StoredTensor
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.packed_blocks import Factors, PackedBlocks
from fastgen.model.layers.int8_linear import Int8Format
from fastgen.model.layers.linear import Linear, PackedFormat, WidenedLinear, as_array

_ABSENT = (0, 0, 0)


class PackedLinear:
    """The product of activations in float32 or bfloat16 with a matrix of packed blocks.

    A row's result does not depend on other rows.
    """

    __slots__ = ("_arrays", "_bits", "_columns", "_offset", "_rows")

    def __init__(self, blocks: PackedBlocks) -> None:
        self._rows, self._columns = blocks.values.shape
        self._bits, self._offset = blocks.bits, blocks.offset
        words = in_word_groups(blocks.values, blocks.bits)
        self._arrays: tuple[npt.NDArray[Any], ...] = (words, *_laid(blocks.scales), *_laid(blocks.minimums))

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return sum(array.nbytes for array in self._arrays)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product, in the type of `x`."""
        # Imported late, because importing it compiles the kernel, which another process does during loading.
        from fastgen.kernels.cpu.matmul.packed import multiply

        assert x.dim() == 2
        assert x.shape[1] == self._columns
        words, halves, steps, *minimums = self._arrays
        weights = (words, halves, steps, minimums[0], minimums[1], self._offset)
        out = torch.empty(len(x), len(words) * TILE_LANES, dtype=x.dtype)
        multiply(self._bits, as_array(x.contiguous()), *weights, as_array(out))
        return out if out.shape[1] == self._rows else out[:, : self._rows].contiguous()

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n] of the matrix in float32: it is also an embedding table."""
        groups, lanes = np.divmod(rows.numpy(), TILE_LANES)
        words, *factors = (
            np.ascontiguousarray(array[groups, :, lanes]) if array.size else None for array in self._arrays
        )
        scales, minimums = (_factors(*pair) for pair in (factors[:2], factors[2:]))
        assert words is not None
        assert scales is not None
        chosen = PackedBlocks(self._bits, unpacked(words, self._bits), self._offset, scales, minimums)
        return torch.from_numpy(chosen.dequantised())


def _factors(halves: npt.NDArray[Any] | None, steps: npt.NDArray[Any] | None) -> Factors | None:
    """Return the factors of rows that `_laid` has laid out."""
    return None if halves is None else Factors(halves.view(np.float16), steps)


def _laid(factors: Factors | None) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8]]:
    """Lay halves and steps out in groups of outputs; empty arrays stand for what is absent."""
    halves, steps = np.empty(_ABSENT, np.uint16), np.empty(_ABSENT, np.int8)
    if factors is not None:
        halves = in_groups(factors.halves.view(np.uint16), factors.halves.shape[1], TILE_LANES)
        if factors.steps is not None:
            steps = in_groups(factors.steps, factors.steps.shape[1], TILE_LANES)
    return halves, steps


class _Joined:
    """The product with matrices of different forms, which yield neighbouring outputs."""

    __slots__ = ("products",)

    def __init__(self, products: tuple[Linear, ...]) -> None:
        self.products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return torch.cat([product(x) for product in self.products], 1)


class StoredFormat(Int8Format):
    """Weights on the CPU with matrices in the blocks that the checkpoint stores.

    Matrices that it stores as floating-point numbers stay in `dtype`. A tied embedding exists once.

    Raises:
        ConfigError: as `Int8Format`.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, choice: str | None = None) -> None:
        super().__init__(dtype, choice)
        self._head: tuple[StoredTensor, EmbeddingTable] | None = None  # until the embedding, which it may be tied to

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the product with the matrices as they are stored; those of the same form are one matrix."""
        stored = [(part, part.blocks()) for part in parts]
        runs = [list(run) for _, run in groupby(stored, lambda pair: _form(pair[1]))]
        products = [self._product([part for part, _ in run], [blocks for _, blocks in run]) for run in runs]
        return products[0] if len(products) == 1 else _Joined(tuple(products))

    def head(self, part: StoredTensor) -> Linear:
        """Return the product with the matrix as it is stored, with float32 results."""
        blocks = part.blocks()
        if blocks is None:
            return PackedFormat.head(self, part)
        if isinstance(blocks, PackedBlocks):
            packed = PackedLinear(blocks)
            self._head = (part, packed.look_up)
            return WidenedLinear(packed)
        product = self.of_blocks(blocks)
        self._head = (part, product.look_up)
        return WidenedLinear(product)

    def table(self, part: StoredTensor) -> EmbeddingTable:
        """Return an embedding table, which a tied head shares."""
        head, self._head = self._head, None
        return head[1] if head is not None and head[0] is part else super().table(part)

    def _product(self, parts: Sequence[StoredTensor], stored: Sequence[StoredBlocks | None]) -> Linear:
        """Return the product with stored matrices of one form."""
        packed = [blocks for blocks in stored if isinstance(blocks, PackedBlocks)]
        if packed:
            return PackedLinear(PackedBlocks.stacked(packed))
        int8 = [blocks for blocks in stored if isinstance(blocks, Int8Blocks)]
        return self.of_blocks(Int8Blocks.stacked(int8)) if int8 else PackedFormat.linear(self, parts)


def _form(blocks: StoredBlocks | None) -> object:
    return blocks.form if isinstance(blocks, PackedBlocks) else type(blocks)
