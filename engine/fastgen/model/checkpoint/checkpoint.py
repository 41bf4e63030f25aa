"""The interface of checkpoints, whatever their file format.

Tensors have the names of `ModelArchitecture.tensor_shapes`. Both formats are checked against its shapes: a tensor that
is missing, unknown or has another shape is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.int8_blocks import Int8Blocks


class EmbeddingTable(Protocol):
    """An embedding table."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows [n] int64 and return a new [n, columns]."""


class StoredTensor(Protocol):
    """A tensor in a checkpoint, read on demand."""

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""

    def int8(self) -> Int8Blocks:
        """Read a matrix as int8 blocks."""

    def table(self) -> EmbeddingTable:
        """Read a matrix as a table of float32 rows, kept in the stored format to save memory."""


class Checkpoint:
    """Tensors by the names of `ModelArchitecture.tensor_shapes`.

    Attributes:
        rope_factors: [head_dim / 2] divisors of the rotary frequencies (llama3 scaling in GGUF files), or None.
    """

    def __init__(self, find: Callable[[str], StoredTensor], rope_factors: torch.Tensor | None = None) -> None:
        self._find = find
        self.rope_factors = rope_factors

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor without reading it."""
        return self._find(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor as float32."""
        return self._find(name).float32()


def check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the file's tensor shapes with the expected ones; raise ModelError at the first difference."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{path}: tensor {name} is missing: the checkpoint is incomplete")
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} has shape {found[name]}, the model's configuration says {shape}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]} is not part of the model that its configuration describes: "
            "ignoring it would change the results"
        )
