"""A model's tensors under one set of names, whatever file they come from.

Both kinds of checkpoint are checked against the shapes that the architecture asks for: a tensor that is missing, has
another shape, or is not known here is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.tensor_names import pieces, stored_shapes
from fastgen.model.config.architecture import HEAD, ModelArchitecture


class Table(Protocol):
    """A matrix whose rows are looked up."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [n] int64, each [columns]: a new [n, columns]."""


class Stored(Protocol):
    """A tensor where it lies; it is read when its values are asked for."""

    def float32(self) -> torch.Tensor:
        """The values."""

    def int8(self) -> Int8Blocks:
        """A matrix as int8 blocks."""

    def table(self) -> Table:
        """A matrix whose rows are looked up in float32: held as it is stored, which takes less memory."""


class Checkpoint:
    """Tensors by the names of `ModelArchitecture.tensor_shapes`.

    Attributes:
        rope_factors: [head_dim / 2], what rotary frequencies are divided by, or None (GGUF's way of llama3 scaling).
    """

    def __init__(self, find: Callable[[str], Stored], rope_factors: torch.Tensor | None = None) -> None:
        self._find = find
        self.rope_factors = rope_factors

    def stored(self, name: str) -> Stored:
        """One tensor, not read yet."""
        return self._find(name)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, float32."""
        return self._find(name).float32()


def check(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError unless `found` is exactly what is expected. Names are those of the file."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{path}: tensor {name} is missing: the checkpoint is incomplete")
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} has shape {found[name]}, the model's configuration says {shape}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]} is not part of the model that its configuration describes: "
            "it cannot be left out"
        )


def open_safetensors(directory: Path, architecture: ModelArchitecture) -> Checkpoint:
    """The checkpoint of a Hugging Face directory.

    Raises:
        ModelError: naming the file or the tensor at fault.
    """
    files: dict[Path, Any] = {path: safetensors.safe_open(path, "pt") for path in _safetensors_files(directory)}
    holder = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (not a dict)
    found = {name: tuple(file.get_slice(name).get_shape()) for name, file in holder.items() if not _is_derived(name)}
    if architecture.tie_word_embeddings:
        found.pop(HEAD, None)
    places = pieces(architecture)
    check(directory, stored_shapes(architecture.tensor_shapes(), places), found)

    def read(name: str) -> torch.Tensor:
        piece = places[name]
        file = holder[piece.name]
        values: torch.Tensor = (
            file.get_tensor(piece.name) if piece.rows is None else file.get_slice(piece.name)[piece.rows]
        )
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(
                f"{directory}: tensor {piece.name} is {values.dtype}: float32, bfloat16 and float16 are served"
            )
        return values

    return Checkpoint(lambda name: FloatTensor(lambda: read(name)))


class FloatTensor:
    """A tensor stored as numbers of some floating-point format."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def float32(self) -> torch.Tensor:
        """The values."""
        return self._read().to(torch.float32)

    def int8(self) -> Int8Blocks:
        """The nearest int8 blocks."""
        return Int8Blocks.quantise(self.float32().numpy())

    def table(self) -> Table:
        """The matrix in its own format."""
        # A copy: a file that is mapped may be put out of memory, and a pass must not wait for a disk.
        values = self._read().clone()
        return lambda rows: values.index_select(0, rows).to(torch.float32)


def _is_derived(name: str) -> bool:
    """Old checkpoints carry the rotary frequencies, which follow from the configuration."""
    return name.endswith("rotary_emb.inv_freq")


def _safetensors_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read as an index of safetensors files ({error})") from None
    else:
        files = [single]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{directory}: {path.name} is missing: the weights must be safetensors files")
    return files
