"""Checkpoints of GGUF files, under the engine's tensor names and order of rows."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fastgen.model.checkpoint.checkpoint import Checkpoint, EmbeddingTable, check_tensors
from fastgen.model.checkpoint.dequantise import dequantise
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.checkpoint.gguf_tensor_names import locate_tensors, stored_shapes
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.safetensors_tensor_names import TensorLocation
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.rope_from_gguf import LONG_FACTORS, SHORT_FACTORS

ROPE_FACTORS = "rope_freqs.weight"

Scalar = TypeVar("Scalar", bound=np.generic)


def open_gguf(file: GGUFFile, architecture: ModelArchitecture) -> Checkpoint:
    """Open the checkpoint in a GGUF file.

    Raises:
        ModelError: naming a tensor that is missing, unknown or has another shape.
    """
    shapes, names = architecture.tensor_shapes(), frozenset(file.tensor_names())
    found = {name: file.shape(name) for name in names - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}}
    locations = locate_tensors(architecture, names)
    experts = max((layer.experts.count for layer in architecture.layers if layer.experts), default=0)
    check_tensors(file.path, stored_shapes(shapes, locations, experts), found)
    factors = torch.from_numpy(np.array(file.tensor(ROPE_FACTORS))) if ROPE_FACTORS in names else None
    return Checkpoint(lambda name: GGUFTensor(file, locations[name], shapes[name]), factors)


class GGUFTensor:
    """A tensor in a GGUF file; see `checkpoint.StoredTensor`."""

    def __init__(self, file: GGUFFile, location: TensorLocation, shape: tuple[int, ...]) -> None:
        self._kind, raw = file.raw(location.name)
        self._shape = shape
        self._heads = location.paired_heads
        columns = file.shape(location.name)[-1]
        first_value = location.first_row * columns if len(shape) > 1 else location.first_row
        block, block_bytes = self._kind.block, self._kind.block_bytes
        start, size = first_value // block * block_bytes, math.prod(shape) // block * block_bytes
        self._raw = raw[start : start + size]

    def float32(self) -> torch.Tensor:
        """Read the exact values as float32."""
        values = _unpaired(dequantise(self._raw, self._kind).reshape(self._shape), self._heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def int8(self) -> Int8Blocks:
        """Read a matrix as int8 blocks: exact if the file stores such blocks, otherwise quantised."""
        blocks = Int8Blocks.of_tensor(self._raw, self._kind, self._shape[-1])
        return Int8Blocks(_unpaired(blocks.values, self._heads), _unpaired(blocks.scales, self._heads))

    def table(self) -> EmbeddingTable:
        """Read the matrix in the file's blocks; rows are dequantised as they are looked up."""
        assert not self._heads, "only rows of projections are permuted"
        # Copy: pages of a mapped file may be evicted, and a step must not wait for the disk.
        stored, kind = self._raw.reshape(self._shape[0], -1).copy(), self._kind

        def look_up(rows: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(dequantise(stored[rows.numpy()].reshape(-1), kind).reshape(len(rows), -1))

        return look_up


def _unpaired(values: npt.NDArray[Scalar], heads: int) -> npt.NDArray[Scalar]:
    """Undo llama.cpp's permutation of rows (`TensorLocation.paired_heads`)."""
    if not heads:
        return values
    return values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
