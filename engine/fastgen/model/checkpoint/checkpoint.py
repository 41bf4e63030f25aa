"""The interface of checkpoints, whatever their file format.

Tensors have the names of `ModelArchitecture.tensor_shapes`. Both formats are checked against its shapes: a tensor that
is missing, unknown or has another shape is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.kv_scales import KVScales

# Looks up rows [n] int64 of an embedding table and returns a new [n, columns].
EmbeddingTable = Callable[[torch.Tensor], torch.Tensor]


class StoredTensor(Protocol):
    """A tensor in a checkpoint, read on demand, in any thread."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, which is known without reading it."""

    def values(self) -> torch.Tensor:
        """Read the values in a floating type that holds them exactly; may be a view of a mapped file."""

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""

    def int8(self) -> Int8Blocks:
        """Read a matrix as int8 blocks."""

    def table(self) -> EmbeddingTable:
        """Read a matrix as a table of float32 rows, kept in the stored format to save memory."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a checkpoint stores a tensor.

    Attributes:
        name: the file's tensor, which may stack several tensors.
        first_row: first row in the file's tensor, with all its leading dimensions flattened.
        paired_heads: number of heads whose rows llama.cpp has permuted; 0 if none. It rotates neighbouring rows of
            Llama's queries and keys, where Hugging Face and this engine rotate the halves of a head.
    """

    name: str
    first_row: int = 0
    paired_heads: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by the names of `ModelArchitecture.tensor_shapes`.

    Attributes:
        stored: returns a tensor without reading it.
        head: name of the output head's tensor. A safetensors file may have a head of its own although config.json ties
            it to the embedding.
        rope_factors: [rotated dimensions / 2] divisors of the rotary frequencies (llama3 scaling in GGUF files), or
            None.
        kv_scales: scales of a float8 KV cache for each layer, or None.
    """

    stored: Callable[[str], StoredTensor]
    head: str
    rope_factors: torch.Tensor | None = None
    kv_scales: tuple[KVScales, ...] | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor as float32."""
        return self.stored(name).float32()


def rows_before(shapes: Mapping[str, tuple[int, ...]], name: str, part: str, parts: Sequence[str]) -> int:
    """Return the row at which a tensor begins in the stacked tensor that contains it.

    Args:
        shapes: shapes of all tensors by name.
        name: the tensor.
        part: one of `parts`, the one in `name`.
        parts: what the stacked tensor contains, in order, for example `self_attn.q_proj`.
    """
    return sum(shapes[name.replace(part, before)][0] for before in parts[: parts.index(part)])


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], locations: Mapping[str, TensorLocation], experts: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the file's tensors.

    Args:
        shapes: shapes of the model's tensors by name.
        locations: where the file stores them, by the same names.
        experts: number of experts in a layer. A GGUF file stacks them in one tensor.
    """
    stored: dict[str, tuple[int, ...]] = {}
    rows: dict[str, int] = {}
    for name, location in locations.items():
        count, *rest = shapes[name]
        rows[location.name] = count = max(rows.get(location.name, 0), location.first_row + count)
        if "_exps." in location.name:
            stored[location.name] = (experts, count // experts, *rest)
        elif "_inp_shexp." in location.name:
            stored[location.name] = tuple(rest)  # llama.cpp's converter drops a dimension of 1
        else:
            stored[location.name] = (count, *rest)
    return stored


def check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes of the file's tensors with the expected ones.

    Raises:
        ModelError: naming the first tensor that is missing, unknown or has another shape.
    """
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
