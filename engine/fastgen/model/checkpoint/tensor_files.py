"""The safetensors files of a Hugging Face directory, as one collection of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch

from fastgen.model import ModelError, first_line
from fastgen.model.config.fields import shown
from fastgen.model_files import is_inside, read_json_object


class TensorFiles:
    """All tensors of the files, read on demand. Those whose names begin with one of `ignored` are left out.

    Raises:
        ConfigError: if the index cannot be read.
        ModelError: naming the faulty file.
    """

    def __init__(self, directory: Path, ignored: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self._holder = {name: file for name, file in _open_files(directory).items() if not name.startswith(ignored)}

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def __iter__(self) -> Iterator[str]:
        return iter(self._holder)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._holder[name].get_slice(name).get_shape())

    def type_name(self, name: str) -> str:
        """Return the name that safetensors has for a tensor's type, for example BF16 or F8_E4M3."""
        return str(self._holder[name].get_slice(name).get_dtype())

    def read(self, name: str, *part: slice) -> torch.Tensor:
        """Read a tensor, or a part of its first dimensions; may be a view of a mapped file.

        Raises:
            ModelError: naming the tensor.
        """
        file = self._holder[name]
        try:
            values: torch.Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        except Exception as error:  # safetensors raises several, for example for a type that torch does not have
            raise ModelError(f"{self.directory}: tensor {name} cannot be read ({first_line(error)})") from None
        return values

    def expect(self, name: str, types: Collection[str], shape: tuple[int | None, ...]) -> tuple[int, ...]:
        """Check a tensor's type and shape, and return the shape. A size of None can be any.

        Raises:
            ModelError: naming the tensor.
        """
        if name not in self:
            raise ModelError(f"{self.directory}: tensor {name} is missing: the checkpoint is incomplete")
        found, kind = self.shape(name), self.type_name(name)
        if kind not in types:
            raise ModelError(f"{self.directory}: tensor {name} has type {kind}: expected {' or '.join(types)}")
        fits = len(found) == len(shape) and all(b in (None, a) for a, b in zip(found, shape, strict=True))
        if not fits or not all(found):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise ModelError(f"{self.directory}: tensor {name} has shape {found}: expected ({sizes})")
        return found


def _open_files(directory: Path) -> dict[str, Any]:
    """Return the open safetensors file of each tensor, by the tensor's name."""
    holder: dict[str, Any] = {}
    for path in safetensors_files(directory):
        try:
            file: Any = safetensors.safe_open(path, "pt")
        except Exception as error:  # safetensors.SafetensorError, OSError and others
            raise ModelError(f"{path}: cannot be read as a safetensors file ({first_line(error)})") from None
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in holder:
                raise ModelError(f"{path}: tensor {name} is in another file of the checkpoint too: remove one of them")
            holder[name] = file
    return holder


def safetensors_files(directory: Path) -> list[Path]:
    """Return the checkpoint's files: model.safetensors, or those of the index if that file does not exist.

    Raises:
        ConfigError: if the index cannot be read.
        ModelError: naming the faulty or missing file.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    files = _indexed_files(index) if index.is_file() and not single.is_file() else [single]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{directory}: {path.name} is missing: expected all weights in safetensors files")
    return files


def _indexed_files(index: Path) -> list[Path]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index}: weight_map must be an object with the name of a file for each tensor")
    for name in names.values():
        if not name.endswith(".safetensors") or not is_inside(name):
            raise ModelError(f"{index}: weight_map names {shown(name)}: expected a safetensors file in the directory")
    return sorted({index.parent / name for name in names.values()})
