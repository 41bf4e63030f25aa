"""Reader of GGUF files: metadata eagerly, tensors on demand.

Format: the GGUF specification of ggml, versions 2 and 3, little-endian. The checks of damaged files are those of
llama.cpp's reader (ggml/src/gguf.cpp).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf_types import TYPES, TensorType, dequantise
from fastgen.model.config.fields import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_MOST_NAME = 64  # bytes of a tensor's name, in ggml
# Bounds on the time and memory to read what precedes the tensors' data. The largest files, with a vocabulary, its
# merges and a tokenizer.json, have about 40 MiB, a few hundred keys, some ten thousand tensors, and arrays of half a
# million entries.
_MOST_HEAD = 128 << 20
_MOST_KEYS, _MOST_TENSORS, _MOST_ENTRIES = 1 << 16, 1 << 20, 1 << 22

# struct codes of GGUF value types 0 to 12, without string and array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # before the bytes of a string


class _Truncated(Exception):
    """The file ends in the middle of a value."""


class _Damaged(Exception):
    """The file has a value that the format does not allow, or that exceeds a bound; the message names it."""


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
        start = self._advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self._data, start)[0]

    def string(self) -> str:
        start = self._advance(self.scalar("Q"))
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Damaged(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _MOST_ENTRIES:
            raise _Damaged(f"array of {count} entries")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise _Damaged(f"array of type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
        start = self._advance(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._data, dtype, count, start).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        """Read strings in one loop: a vocabulary and its merges are most of the time to read the metadata."""
        data, limit, position = self._data, min(len(self._data), _MOST_HEAD), self.position
        found = []
        for _ in range(count):
            start = position + _LENGTH.size
            position = start + (_LENGTH.unpack_from(data, position)[0] if start <= limit else 0)
            if position > limit:
                break
            found.append(data[start:position].decode("utf-8", errors="replace"))
        self._advance(position - self.position)  # fails if the last string ends beyond the limit
        return found

    def _advance(self, size: int) -> int:
        """Move past `size` bytes and return where they begin."""
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            raise _Truncated
        if self.position > _MOST_HEAD:
            raise _Damaged(f"metadata of more than {_MOST_HEAD >> 20} MiB")
        return start


class GGUFFile:
    """A memory-mapped GGUF file. Its methods raise KeyError for a tensor that it does not have.

    Attributes:
        path: the file.
        metadata: key-value pairs as Python values (str, int, float, bool, list).

    Raises:
        ModelError: if the file cannot be read, is not GGUF or has an unsupported version, is truncated or damaged, or
            has a tensor of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # for example of an empty file
            raise ModelError(f"{path}: cannot be read as a GGUF file ({error})") from None
        cursor = _Cursor(self._data)
        try:
            num_tensors, num_keys = self._read_header(cursor)
            if num_tensors > _MOST_TENSORS or num_keys > _MOST_KEYS:
                raise _Damaged(f"{num_tensors} tensors and {num_keys} keys")
            self.metadata: Mapping[str, Any] = self._read_metadata(cursor, num_keys)
            self._tensors = self._read_tensor_infos(cursor, num_tensors)
        except _Truncated:
            raise ModelError(f"{path}: the GGUF file is truncated: download it again") from None
        except _Damaged as error:
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

    def quantised_size(self) -> tuple[int, int]:
        """Return the number of values in tensors with shared scales, and the bytes that these take in the file."""
        tensors = [info for info in self._tensors.values() if info.type.is_quantised]
        return sum(math.prod(info.shape) for info in tensors), sum(info.num_bytes for info in tensors)

    def matrix_types(self) -> Mapping[str, int]:
        """Return the number of matrices of each type, the most frequent first."""
        return dict(Counter(info.type.name for info in self._tensors.values() if len(info.shape) > 1).most_common())

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

    def _read_metadata(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string()
            if not key or key in metadata:
                raise _Damaged(f"repeated or empty key {shown(key)}")
            metadata[key] = cursor.value(cursor.scalar("I"))
        return metadata

    def _read_tensor_infos(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
        for _ in range(count):
            name, num_dimensions = cursor.string(), cursor.scalar("I")
            if name in entries or len(name.encode()) >= _MOST_NAME:
                raise _Damaged(f"repeated or long tensor name {shown(name)}")
            if num_dimensions > _MOST_DIMENSIONS:
                raise _Damaged(f"tensor {name} with {num_dimensions} dimensions")
            shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
            entries[name] = shape, self._type_of(name, cursor.scalar("I"), shape), cursor.scalar("Q")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment {shown(alignment)}, which is not a power of 2")
        data_start, end = -(-cursor.position // alignment) * alignment, 0
        tensors = {}
        for name, (shape, tensor_type, offset) in entries.items():
            num_bytes = math.prod(shape) // tensor_type.block * tensor_type.block_bytes
            if offset != end:  # tensors follow one another, in the order of their entries
                raise _Damaged(f"tensor {name} at offset {offset} instead of {end}")
            tensors[name] = info = TensorInfo(shape, tensor_type, data_start + offset, num_bytes)
            if info.offset + info.num_bytes > len(self._data):
                raise _Truncated
            end += -(-num_bytes // alignment) * alignment
        return tensors

    def _type_of(self, name: str, kind: int, shape: tuple[int, ...]) -> TensorType:
        found = TYPES.get(kind)
        if found is None:
            raise ModelError(
                f"{self.path}: tensor {name} has {_name_of(kind)}, which is not supported: convert the model to "
                f"Q8_0, Q4_K_M or F16 (supported: {', '.join(each.name for each in TYPES.values())})"
            )
        row = shape[-1] if shape else 1
        if row % found.block:
            raise _Damaged(f"tensor {name}: rows of {row} values cannot be in blocks of {found.block}")
        return found


def _name_of(kind: int) -> str:
    """Return the name of an unsupported type, from the package gguf, which knows all types."""
    import gguf  # slow

    try:
        return f"type {gguf.GGMLQuantizationType(kind).name}"
    except ValueError:
        return f"the unknown type {kind}"
