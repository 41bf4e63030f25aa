"""Strategies that damage the files of a model: bytes, values of JSON, and entries of GGUF and safetensors heads."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

# Values at which counts, lengths and offsets overflow, or lie just outside of a file.
EDGES = [0, 1, 2, 31, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]

numbers = st.one_of(
    st.sampled_from([*EDGES, *(-edge for edge in EDGES)]),
    st.integers(-4, 4096),
    st.integers(),
    st.sampled_from([10**40, -(10**40), 10**400]),
    st.floats(),
    st.sampled_from([1e-320, 1e308, -0.0, float("nan"), float("inf"), -float("inf")]),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "yarn", "linear", "longrope", "../../etc/passwd", "/dev/zero", "\x00", "\n", "a" * 5000]),
    st.sampled_from(["full_attention", "sliding_attention", "gelu", "true", "7", "\ud800", "\u2028"]),
)
_scalars = st.one_of(st.none(), st.booleans(), numbers, texts)


def _nested(depth: int) -> Any:
    """Return lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


json_values: st.SearchStrategy[Any] = st.one_of(
    st.recursive(
        _scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
        max_leaves=8,
    ),
    st.integers(1, 400).map(_nested),
)


@dataclass(frozen=True)
class Edit:
    """A change of bytes at a place, given as a fraction of their length."""

    kind: str
    place: float
    number: int

    def apply(self, content: bytes) -> bytes:
        at = int(self.place * len(content))
        match self.kind:
            case "cut":
                return content[:at]
            case "drop":
                return content[:at] + content[at + self.number % 64 :]
            case "repeat":
                return content[: at + self.number % 64] + content[at:]
            case "byte":
                return content[:at] + bytes([self.number % 256]) + content[at + 1 :]
            case "uint32":
                return content[:at] + struct.pack("<I", self.number % 2**32) + content[at + 4 :]
            case "uint64":
                return content[:at] + struct.pack("<Q", self.number % 2**64) + content[at + 8 :]
        raise AssertionError(self.kind)


edits = st.lists(
    st.builds(
        Edit,
        st.sampled_from(["cut", "drop", "repeat", "byte", "uint32", "uint64"]),
        st.floats(0, 1),
        st.sampled_from(EDGES) | st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, changes: list[Edit]) -> bytes:
    for change in changes:
        content = change.apply(content)
    return content


# GGUF value types: struct codes of the scalars, then strings and arrays.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFValue:
    """A value with the type under which it is written; arrays have the type of their entries."""

    kind: int
    value: Any
    is_array: bool = False

    def encoded(self) -> bytes:
        if self.is_array:
            entries = b"".join(_scalar(self.kind, entry) for entry in self.value)
            return struct.pack("<IIQ", 9, self.kind, len(self.value)) + entries
        return struct.pack("<I", self.kind) + _scalar(self.kind, self.value)


def _scalar(kind: int, value: Any) -> bytes:
    if kind == 8:
        content: bytes = value.encode("utf-8", errors="surrogatepass")
        return struct.pack("<Q", len(content)) + content
    if kind == 9:  # an array in an array: no reader accepts it
        return struct.pack("<IQ", 4, 0)
    return struct.pack("<" + _CODES[kind], value)


def _integers(kind: int) -> st.SearchStrategy[int]:
    bits = struct.calcsize(_CODES[kind]) * 8
    least, most = (0, 2**bits - 1) if _CODES[kind].isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.sampled_from([edge for edge in EDGES if least <= edge <= most]) | st.integers(least, most)


_ENTRIES: dict[int, st.SearchStrategy[Any]] = {
    **{kind: _integers(kind) for kind in (0, 1, 2, 3, 4, 5, 10, 11)},
    6: st.floats(width=32),
    7: st.booleans(),
    8: texts,
    9: st.just(0),
    12: st.floats(),
}
gguf_values = st.one_of(
    *(st.builds(GGUFValue, st.just(kind), entry) for kind, entry in _ENTRIES.items() if kind != 9),
    *(
        st.builds(GGUFValue, st.just(kind), st.lists(entry, max_size=6), st.just(True))
        for kind, entry in _ENTRIES.items()
    ),
)


@dataclass(frozen=True)
class GGUFTensorInfo:
    """A tensor's entry in a GGUF head: dimensions as in the file, ggml's type, and its offset."""

    dimensions: tuple[int, ...]
    kind: int
    offset: int


def gguf_file(
    metadata: list[tuple[str, GGUFValue]], tensors: list[tuple[str, GGUFTensorInfo]], data: bytes, alignment: int = 32
) -> bytes:
    """Return the bytes of a GGUF file with these entries, right or wrong."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata:
        head += _scalar(8, key) + value.encoded()
    for name, info in tensors:
        head += _scalar(8, name) + struct.pack("<I", len(info.dimensions))
        head += b"".join(struct.pack("<Q", size) for size in info.dimensions)
        head += struct.pack("<IQ", info.kind, info.offset)
    return head + bytes(-len(head) % alignment) + data
