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
from fastgen.model.checkpoint.packed_blocks import PackedBlocks

# A matrix in the blocks in which a checkpoint stores it.
StoredBlocks = PackedBlocks | Int8Blocks

# Looks up rows [n] int64 of an embedding table and returns a new [n, columns].
EmbeddingTable = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows and columns of a tensor; None for all of them. A vector has only rows."""

    rows: range | None = None
    columns: range | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor with the shape `whole`."""
        cut = tuple(
            size if some is None else len(some) for size, some in zip(whole, (self.rows, self.columns), strict=False)
        )
        return cut + whole[2:]


WHOLE = Part()


class Readable(Protocol):
    """What is read on demand, in any thread, into a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, which is known without reading it."""

    def values(self) -> torch.Tensor:
        """Read the values; may be a view of a mapped file."""


class StoredTensor(Readable, Protocol):
    """A tensor in a checkpoint; its values have a floating type that holds them exactly."""

    @property
    def block(self) -> int:
        """Columns that are stored together: a part has whole blocks of them."""

    def part(self, part: Part) -> StoredTensor:
        """Return a part of a whole tensor, of which nothing else is read.

        Raises:
            ModelError: if it does not have whole blocks of columns.
        """

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""

    def int8(self) -> Int8Blocks:
        """Read a matrix as int8 blocks."""

    def blocks(self) -> StoredBlocks | None:
        """Read a matrix in the blocks that the checkpoint stores, or None if it stores floating-point numbers.

        Blocks of up to six bits that have the form of `PackedBlocks` are exact; others are quantised to eight bits.
        """

    def table(self) -> EmbeddingTable:
        """Read a matrix as a table of float32 rows, kept in the stored format to save memory."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a checkpoint stores a tensor.

    Attributes:
        name: the file's tensor, which may stack several tensors.
        first_row: first row in the file's tensor, with all its leading dimensions flattened.
        paired_heads: number of heads in which neighbouring rows are rotated together; 0 if the halves of a head are, as
            in this engine. llama.cpp permutes Llama's queries and keys so, and some families are trained so.
        step: from one of its rows to the next: 2 where the rows of two tensors alternate.
        stack: number of matrices or vectors, of as many experts, in the file's tensor; 0 if it has no such dimension.
        transposed: whether the stacked matrices are [in, out].
        interleaved: if the file's tensor has the rows of several tensors group by group, the number of groups, and how
            many rows each tensor has in a group. `first_row` counts as if the tensors followed one another.
    """

    name: str
    first_row: int = 0
    paired_heads: int = 0
    step: int = 1
    stack: int = 0
    transposed: bool = False
    interleaved: tuple[int, tuple[int, ...]] | None = None


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
    shapes: Mapping[str, tuple[int, ...]], locations: Mapping[str, TensorLocation]
) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the file's tensors.

    Args:
        shapes: shapes of the model's tensors by name.
        locations: where the file stores them, by the same names.
    """
    stored: dict[str, tuple[int, ...]] = {}
    rows: dict[str, int] = {}
    for name, location in locations.items():
        count, *rest = shapes[name]
        end = location.first_row + (count - 1) * location.step + 1
        rows[location.name] = count = max(rows.get(location.name, 0), end)
        if location.stack:
            each = (count // location.stack, *rest)
            stored[location.name] = (location.stack, *(each[::-1] if location.transposed else each))
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
