"""Weights that a checkpoint stores quantised: the base of all formats, and what the loader reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, Part, StoredBlocks
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.quantized.matrices import IntegerMatrix, QuantizedMatrix
from fastgen.model.checkpoint.tensor_files import TensorFiles

FLOATS = ("F16", "BF16", "F32")


class QuantizedWeight(ABC):
    """A module's weight in one format. Making it checks the types and shapes of its tensors, and reads none.

    Attributes:
        shape: [rows, columns] of the matrix, after the number of experts if they are stacked.
        tensors: the tensors of the file that it consists of, those included that nothing reads.

    Raises:
        ModelError: naming a tensor that is missing, or has another type or shape.
    """

    shape: tuple[int, ...]
    tensors: frozenset[str]

    def __init__(self, files: TensorFiles, module: str, parts: Iterable[str], unread: Iterable[str] = ()) -> None:
        self._files = files
        self._module = module
        self.tensors = frozenset(name for part in (*parts, *unread) if (name := self._name(part)) in files)

    @abstractmethod
    def read(self, first: int, count: int) -> QuantizedMatrix:
        """Read `count` rows from row `first` on; the rows of stacked experts follow each other.

        Raises:
            ModelError: naming a tensor that cannot be read, or has values that cannot be used.
        """

    def _name(self, part: str) -> str:
        return f"{self._module}.{part}"

    def _error(self, part: str, fault: str) -> ModelError:
        return ModelError(f"{self._files.directory}: tensor {self._name(part)} {fault}")


class QuantizedIntegers(QuantizedWeight):
    """A weight of integers.

    Attributes:
        bits: of an integer. With 4, integers are from 0 to 15.
    """

    bits: int

    def read(self, first: int, count: int) -> IntegerMatrix:
        """Read rows."""
        return IntegerMatrix(self.integers(first, count), *self.scales(first, count), self.group_of())

    @abstractmethod
    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read the integers of rows, int8 [count, columns]."""

    @abstractmethod
    def scales(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the scales and the zero points of rows, as `IntegerMatrix` has them."""

    def group_of(self) -> torch.Tensor | None:
        """Read the group of each column, as `IntegerMatrix` has it."""
        return None


class QuantizedTensor:
    """Rows of a quantised weight; see `checkpoint.StoredTensor`. Each call reads and dequantises them again.

    Attributes:
        weight: the weight.
        first: first row in the weight, with all its leading dimensions flattened.
        shape: of the tensor.
        selected: the columns of the weight, which is read with all of them; None for all.
    """

    block = 1  # the matrices in memory can be cut anywhere

    def __init__(
        self, weight: QuantizedWeight, first: int, shape: tuple[int, ...], columns: range | None = None
    ) -> None:
        self.weight = weight
        self.first = first
        self.selected = columns
        self.shape = shape

    def part(self, part: Part) -> QuantizedTensor:
        """Return some rows or columns."""
        first = self.first + (0 if part.rows is None else part.rows.start)
        return QuantizedTensor(self.weight, first, part.shape(self.shape), part.columns)

    def matrix(self) -> QuantizedMatrix:
        """Read the matrix as it is stored."""
        matrix = self.weight.read(self.first, self.shape[0])
        return matrix if self.selected is None else matrix.columns(self.selected)

    def values(self) -> torch.Tensor:
        """Read the values in float32."""
        return self.float32()

    def float32(self) -> torch.Tensor:
        """Read the values in float32."""
        return self.matrix().float32()

    def int8(self) -> Int8Blocks:
        """Read the matrix as int8 blocks, see `QuantizedMatrix.int8`."""
        return self.matrix().int8()

    def blocks(self) -> StoredBlocks:
        """Read integers of four or five bits packed, see `IntegerMatrix.packed`; other values as int8 blocks."""
        matrix = self.matrix()
        packed = None
        if isinstance(matrix, IntegerMatrix) and isinstance(self.weight, QuantizedIntegers):
            packed = matrix.packed(self.weight.bits)
        return matrix.int8() if packed is None else packed

    def table(self) -> EmbeddingTable:
        """Read the matrix as it is stored; rows are dequantised as they are looked up."""
        matrix = self.matrix()
        return lambda rows: matrix.take(rows).float32()
