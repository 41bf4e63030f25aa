"""The tensors of a GGUF file under the engine's names, in the engine's order of rows."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fastgen.model.checkpoint.dequantise import dequantise
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.checkpoint.gguf_tensor_names import Place, places, stored_shapes
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.safetensors import Checkpoint, Table, check
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.rope_from_gguf import LONG_FACTORS, SHORT_FACTORS

ROPE_FACTORS = "rope_freqs.weight"

Scalar = TypeVar("Scalar", bound=np.generic)


def open_gguf(file: GGUFFile, architecture: ModelArchitecture) -> Checkpoint:
    """The checkpoint in a GGUF file.

    Raises:
        ModelError: naming the tensor that is missing, unknown or of another shape.
    """
    shapes, names = architecture.tensor_shapes(), frozenset(file.tensor_names())
    found = {name: file.shape(name) for name in names - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}}
    where = places(architecture, names)
    experts = max((layer.experts.count for layer in architecture.layers if layer.experts), default=0)
    check(file.path, stored_shapes(shapes, where, experts), found)
    factors = torch.from_numpy(np.array(file.tensor(ROPE_FACTORS))) if ROPE_FACTORS in names else None
    return Checkpoint(lambda name: GGUFTensor(file, where[name], shapes[name]), factors)


class GGUFTensor:
    """One of the engine's tensors in a GGUF file; see `checkpoint.Stored`."""

    def __init__(self, file: GGUFFile, place: Place, shape: tuple[int, ...]) -> None:
        self._kind, raw = file.raw(place.name)
        self._shape = shape
        self._heads = place.paired_heads
        columns = file.shape(place.name)[-1]
        first = place.first_row * columns if len(shape) > 1 else place.first_row
        unit = self._kind.block_bytes
        start, count = first // self._kind.block * unit, math.prod(shape) // self._kind.block * unit
        self._raw = raw[start : start + count]

    def float32(self) -> torch.Tensor:
        """The values, exactly."""
        values = _in_halves(dequantise(self._raw, self._kind).reshape(self._shape), self._heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def int8(self) -> Int8Blocks:
        """A matrix as int8 blocks: exactly where the file stores such blocks."""
        blocks = Int8Blocks.of_tensor(self._raw, self._kind, self._shape[-1])
        return Int8Blocks(_in_halves(blocks.values, self._heads), _in_halves(blocks.scales, self._heads))

    def table(self) -> Table:
        """The matrix in the file's blocks; rows are expanded as they are looked up."""
        assert not self._heads, "only rows of projections are reordered"
        # A copy: a file that is mapped may be put out of memory, and a pass must not wait for a disk.
        stored, kind = self._raw.reshape(self._shape[0], -1).copy(), self._kind

        def look_up(rows: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(dequantise(stored[rows.numpy()].reshape(-1), kind).reshape(len(rows), -1))

        return look_up


def _in_halves(values: npt.NDArray[Scalar], heads: int) -> npt.NDArray[Scalar]:
    """Undoes llama.cpp's order of rows (`Place.paired_heads`)."""
    if not heads:
        return values
    return values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
