"""Products with int8 matrices.

Activations stay float32, or are quantised by the product vnni (`processor.int8_choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, GROUP_LANES, TILE_LANES, in_byte_groups, in_groups
from fastgen.model.checkpoint.checkpoint import StoredTensor
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.layers.linear import Linear, PackedFormat, WidenedLinear, as_array
from fastgen.model.processor import int8_choice


class Int8Format(PackedFormat):
    """Weights on the CPU with int8 matrices; embeddings and routers are not quantised.

    Raises:
        ConfigError: as `PackedFormat` and `int8_choice`.
    """

    block = BLOCK

    def __init__(self, dtype: torch.dtype = torch.float32, choice: str | None = None) -> None:
        super().__init__(dtype, choice)
        self.pads_rows = False  # the int8 kernels take any number of rows
        self._int8_kind = Int8VNNILinear if int8_choice().product == "vnni" else Int8Linear
        assert dtype == torch.float32 or self._int8_kind is Int8VNNILinear

    def linear(self, parts: Sequence[StoredTensor]) -> Linear:
        """Return the product with int8 blocks."""
        return self.of_blocks(Int8Blocks.stacked([part.int8() for part in parts]))

    def of_blocks(self, blocks: Int8Blocks) -> Int8Linear | Int8VNNILinear:
        """Return the product with int8 blocks."""
        return self._int8_kind(blocks)

    def head(self, part: StoredTensor) -> Linear:
        """Return the product with int8 blocks."""
        return WidenedLinear(self.linear([part]))

    def exact(self, part: StoredTensor) -> Linear:
        """Return the packed product, which is not quantised."""
        return super().linear([part])


class _Int8Product:
    """The product with a matrix of int8 blocks, laid out for a kernel in groups of outputs."""

    __slots__ = ("_columns", "_rows", "_scales", "_values")

    def __init__(self, blocks: Int8Blocks, values: npt.NDArray[Any], lanes: int) -> None:
        self._rows, self._columns = blocks.values.shape
        self._values = values
        self._scales = in_groups(blocks.scales, blocks.scales.shape[1], lanes)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self._values.nbytes + self._scales.nbytes

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n] of the matrix in float32: it is also an embedding table."""
        groups, lanes = np.divmod(rows.numpy(), self._scales.shape[2])
        values = self._unpacked(np.ascontiguousarray(self._values[groups, :, lanes]))[:, : self._columns]
        scales = np.ascontiguousarray(self._scales[groups, :, lanes])
        return torch.from_numpy(Int8Blocks(values, scales).dequantised())

    def _unpacked(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Return the weights of outputs that are laid out for the kernel."""
        return values

    def _multiply(self, kernel: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
        """Run the kernel, and remove the outputs that pad the last group."""
        groups, _, lanes = self._scales.shape
        out = torch.empty(x.shape[0], groups * lanes, dtype=x.dtype)
        kernel(as_array(x.contiguous()), self._values, self._scales, as_array(out))
        return out if out.shape[1] == self._rows else out[:, : self._rows].contiguous()


class Int8Linear(_Int8Product):
    """The product of activations in float32 with a matrix of int8 blocks.

    It differs from the product with the dequantised matrix only by rounding of float32 sums.
    """

    __slots__ = ()

    def __init__(self, blocks: Int8Blocks) -> None:
        super().__init__(blocks, in_groups(blocks.values, blocks.scales.shape[1] * BLOCK), GROUP_LANES)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        # Imported late, because importing it compiles the kernel, which another process does during loading.
        from fastgen.kernels.cpu.matmul.int8 import multiply

        assert x.dim() == 2
        assert x.dtype == torch.float32
        assert x.shape[1] == self._columns
        padded = self._values.shape[1]
        if padded != self._columns:
            x = F.pad(x, (0, padded - self._columns))
        return self._multiply(multiply, x)


class Int8VNNILinear(_Int8Product):
    """The product of activations in float32 or bfloat16 with a matrix of int8 blocks.

    Each call quantises its activations, with one scale for each `BLOCK` inputs of a row.
    """

    __slots__ = ()

    def __init__(self, blocks: Int8Blocks) -> None:
        super().__init__(blocks, in_byte_groups(blocks.values), TILE_LANES)

    def _unpacked(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        return (values.view(np.uint8) ^ np.uint8(128)).view(np.int8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        # Imported late, as above.
        from fastgen.kernels.cpu.matmul.int8_vnni import multiply

        assert x.dim() == 2
        assert x.shape[1] == self._columns
        return self._multiply(multiply, x)
