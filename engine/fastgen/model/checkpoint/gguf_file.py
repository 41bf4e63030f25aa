"""Reader of GGUF files: metadata eagerly, tensors on demand.

Format: the GGUF specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.model import ModelError
from fastgen.model.checkpoint.dequantise import TYPES, TensorType, dequantise

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8  # ggml has 4; a larger number means a damaged file

# struct codes of GGUF value types 0 to 12, without string and array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Truncated(Exception):
    """The file ends in the middle of a value."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor in the file. `shape` has rows first, as in NumPy; the file stores the reverse."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


class _Cursor:
    """Reads consecutive GGUF values."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self._data, self.position)
        except struct.error:
            raise _Truncated from None
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, end = self.position, self.position + length
        if end > len(self._data):
            raise _Truncated
        self.position = end
        return self._data[start:end].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self._data):
            raise _Truncated
        if kind in (_STRING, _ARRAY):
            read = self.string if kind == _STRING else self._array
            return [read() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unsupported array type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
        end = self.position + count * dtype.itemsize
        if end > len(self._data):
            raise _Truncated
        values: list[Any] = np.frombuffer(self._data, dtype, count, self.position).tolist()
        self.position = end
        return values


class GGUFFile:
    """A memory-mapped GGUF file. Its methods raise KeyError for a tensor that it does not have.

    Attributes:
        path: the file.
        metadata: key-value pairs as Python values (str, int, float, bool, list).

    Raises:
        ModelError: if the file is not GGUF, has another version, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as a GGUF file ({error})") from None
        cursor = _Cursor(self._data)
        try:
            num_tensors, num_pairs = self._read_header(cursor)
            self.metadata: Mapping[str, Any] = {
                cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_pairs)
            }
            self._tensors = self._read_tensor_infos(cursor, num_tensors)
        except _Truncated:
            raise ModelError(f"{path}: the GGUF file is truncated: download it again") from None
        except ValueError as error:
            raise ModelError(f"{path}: the GGUF file is damaged ({error}): download it again") from None

    def tensor_names(self) -> Sequence[str]:
        """Return the names of all tensors in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, rows first."""
        return self._tensors[name].shape

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor dequantised to float32, rows first; F32 tensors are read-only views of the file."""
        kind, raw = self.raw(name)
        return dequantise(raw, kind).reshape(self._tensors[name].shape)

    def raw(self, name: str) -> tuple[TensorType, npt.NDArray[np.uint8]]:
        """Return a tensor's type and its stored bytes."""
        info = self._tensors[name]
        return info.type, np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)

    def _read_header(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it does not start with the bytes GGUF)")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise ModelError(f"{self.path}: a big-endian GGUF file: convert it to little-endian")
            raise ModelError(
                f"{self.path}: GGUF version {version}: only versions 2 and 3 are supported: convert the model again"
            )
        return cursor.scalar("Q"), cursor.scalar("Q")

    def _read_tensor_infos(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name, num_dimensions = cursor.string(), cursor.scalar("I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name} with {num_dimensions} dimensions")
            shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
            entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            tensor_type = self._type_of(name, kind, shape)
            num_bytes = math.prod(shape) // tensor_type.block * tensor_type.block_bytes
            info = TensorInfo(shape, tensor_type, data_start + offset, num_bytes)
            if info.offset + info.num_bytes > len(self._data):
                raise _Truncated
            tensors[name] = info
        return tensors

    def _type_of(self, name: str, kind: int, shape: tuple[int, ...]) -> TensorType:
        found = TYPES.get(kind)
        if found is None:
            raise ModelError(
                f"{self.path}: tensor {name} has {_name_of(kind)}, which is not supported: convert the model to Q8_0, "
                f"Q4_K_M or F16 (supported: {', '.join(each.name for each in TYPES.values())})"
            )
        if shape and shape[-1] % found.block:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} values cannot be in blocks of {found.block}")
        return found


def _name_of(kind: int) -> str:
    """Return the name of an unsupported type, from the package gguf, which knows all types."""
    import gguf  # slow

    try:
        return f"type {gguf.GGMLQuantizationType(kind).name}"
    except ValueError:
        return f"the unknown type {kind}"
