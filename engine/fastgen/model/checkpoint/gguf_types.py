"""The types of tensors in GGUF files: their layout, and their values as float32, vectorised over many blocks.

Layouts are those of ggml's `block_q*` structs (ggml-common.h). The order of float operations is that of the package
`gguf`, so results are equal bit for bit. They run over parts of a tensor that fit the processor's cache, which is
several times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Structured = npt.NDArray[np.void]

BLOCK = 32  # values in a block of the Q4, Q5 and Q8 families
_SUPER = 256  # values in a block of the K family
_VALUES_AT_A_TIME = 1 << 18

# Types whose values are 4-bit integers times a scale plus an offset, for each `BLOCK` values.
FOUR_BIT_TYPES = ("Q4_0", "Q4_1", "Q4_K")
# The sixteen levels of IQ4 (ggml's kvalues_iq4nl).
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage format of a ggml type.

    Attributes:
        name: ggml's name.
        layout: structure of one block.
        block: values per block.
        expand: writes the values of blocks [n] to float32 [n, block].
    """

    name: str
    layout: np.dtype[np.void]
    block: int
    expand: Callable[[Structured, FloatArray], None]

    @property
    def is_quantised(self) -> bool:
        """Whether values share scales, and are not floating-point numbers themselves."""
        return self.block > 1

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.layout.itemsize


def dequantise(data: Bytes, kind: TensorType) -> FloatArray:
    """Return the values of raw tensor bytes as a flat float32 array; for F32 a view of `data`."""
    blocks = data.view(kind.layout)
    if kind.name == "F32":
        view: FloatArray = blocks["values"].reshape(-1)
        return view
    out = np.empty((len(blocks), kind.block), np.float32)
    step = max(1, _VALUES_AT_A_TIME // kind.block)
    for start in range(0, len(blocks), step):
        kind.expand(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _column(values: npt.NDArray[np.generic]) -> FloatArray:
    """Convert [n] of any number format to float32 [n, 1]."""
    return values.astype(np.float32)[:, None]


def _floats(blocks: Structured, out: FloatArray) -> None:
    out[:] = blocks["values"]


def _bf16(blocks: Structured, out: FloatArray) -> None:
    """bfloat16 is the upper half of a float32."""
    np.left_shift(blocks["values"], 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")


def _q8_0(blocks: Structured, out: FloatArray) -> None:
    np.multiply(blocks["values"], _column(blocks["scale"]), out=out)


def _nibbles(packed: Bytes, out: npt.NDArray[np.generic]) -> None:
    """Split bytes [..., k] into nibbles [..., 2, k], the low ones first."""
    np.bitwise_and(packed, 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., 1, :], casting="unsafe")


def _q4_0(blocks: Structured, out: FloatArray) -> None:
    _nibbles(blocks["nibbles"], out.reshape(-1, 2, BLOCK // 2))
    out -= np.float32(8)
    out *= _column(blocks["scale"])


def _q4_1(blocks: Structured, out: FloatArray) -> None:
    _nibbles(blocks["nibbles"], out.reshape(-1, 2, BLOCK // 2))
    out *= _column(blocks["scale"])
    out += _column(blocks["minimum"])


def four_bits(blocks: Structured) -> Bytes:
    """Return the unsigned values [n, 32] of the Q4_0, Q4_1 and IQ4_NL layouts."""
    values = np.empty((len(blocks), BLOCK), np.uint8)
    _nibbles(blocks["nibbles"], values.reshape(-1, 2, BLOCK // 2))
    return values


def five_bits(blocks: Structured) -> Bytes:
    """Return the unsigned values [n, 32] of the Q5_0 and Q5_1 layouts.

    Four bits are in nibbles, the fifth in a mask.
    """
    values = four_bits(blocks)
    values |= np.unpackbits(blocks["fifth"], axis=1, bitorder="little") << np.uint8(4)
    return values


def _q5_0(blocks: Structured, out: FloatArray) -> None:
    np.subtract(five_bits(blocks), np.float32(16), out=out)
    out *= _column(blocks["scale"])


def _q5_1(blocks: Structured, out: FloatArray) -> None:
    np.multiply(five_bits(blocks), _column(blocks["scale"]), out=out)
    out += _column(blocks["minimum"])


def _iq4_nl(blocks: Structured, out: FloatArray) -> None:
    np.multiply(_IQ4_LEVELS[four_bits(blocks)], _column(blocks["scale"]), out=out)


def _iq4_xs(blocks: Structured, out: FloatArray) -> None:
    n = len(blocks)
    low = np.empty((n, 4, 2, 1), np.uint8)
    _nibbles(blocks["scales_low"][:, :, None], low)
    high = blocks["scales_high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low.reshape(n, 8) | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales *= _column(blocks["scale"])
    levels = np.empty((n, 8, 2, 16), np.uint8)
    _nibbles(blocks["nibbles"].reshape(n, 8, 16), levels)
    np.multiply(_IQ4_LEVELS[levels.reshape(n, 8, 32)], scales[:, :, None], out=out.reshape(n, 8, 32))


def _crumbs(packed: Bytes) -> Bytes:
    """Split bytes [n, k] into two-bit values [n, k / 32, 4, 32].

    Of each 32 bytes, the lowest pairs of bits come first.
    """
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    found: Bytes = packed.reshape(len(packed), -1, 1, 32) >> shifts & np.uint8(3)
    return found


def _q2_k(blocks: Structured, out: FloatArray) -> None:
    scales = (blocks["scales"] & 15).astype(np.float32) * _column(blocks["scale"])
    minimums = (blocks["scales"] >> 4).astype(np.float32) * _column(blocks["minimum"])
    parts = out.reshape(-1, 16, 16)
    np.multiply(_crumbs(blocks["crumbs"]).reshape(-1, 16, 16), scales[:, :, None], out=parts)
    parts -= minimums[:, :, None]


def _q3_k(blocks: Structured, out: FloatArray) -> None:
    packed = blocks["scales"]  # [n, 12]: the low four bits of sixteen scales, then their high two
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales *= _column(blocks["scale"])
    third = blocks["third"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # [n, 8, 32]
    values = _crumbs(blocks["crumbs"]).reshape(-1, 8, 32) | third << np.uint8(2)
    parts = out.reshape(-1, 16, 16)
    # ggml subtracts 4 where the third bit is clear: values 0 to 7 represent -4 to 3.
    np.subtract(values.reshape(-1, 16, 16), np.float32(4), out=parts)
    parts *= scales[:, :, None]


def scales_and_minimums(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the [n, 12] bytes of the Q4_K and Q5_K layouts into six-bit scales and minimums [n, 8].

    The last four of each have two of their bits elsewhere.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, rest & 15 | first >> 2 & 48], axis=1)
    minimums = np.concatenate([second & 63, rest >> 4 | second >> 2 & 48], axis=1)
    return scales, minimums


def _scale_parts(values: npt.NDArray[np.generic], blocks: Structured, out: FloatArray) -> None:
    """Set out = values * scale - minimum for values [n, 8, 32].

    Each eighth of a block has a scale and a minimum.
    """
    scales, minimums = (part.astype(np.float32) for part in scales_and_minimums(blocks["scales"]))
    scales *= _column(blocks["scale"])
    minimums *= _column(blocks["minimum"])
    parts = out.reshape(-1, 8, 32)
    np.multiply(values, scales[:, :, None], out=parts)
    parts -= minimums[:, :, None]


def k_four_bits(blocks: Structured) -> Bytes:
    """Return the unsigned values [n, 8, 32] of the Q4_K layout, and the lower bits of Q5_K's."""
    values = np.empty((len(blocks), 8, 32), np.uint8)
    _nibbles(blocks["nibbles"].reshape(-1, 4, 32), values.reshape(-1, 4, 2, 32))
    return values


def k_five_bits(blocks: Structured) -> Bytes:
    """Return the unsigned values [n, 8, 32] of the Q5_K layout."""
    values = k_four_bits(blocks)
    fifth = blocks["fifth"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    values |= fifth << np.uint8(4)
    return values


def k_six_bits(blocks: Structured) -> Bytes:
    """Return the unsigned values [n, 16, 16] of the Q6_K layout."""
    n = len(blocks)
    values = np.empty((n, 2, 2, 64), np.uint8)
    _nibbles(blocks["nibbles"].reshape(n, 2, 64), values)
    values |= _crumbs(blocks["crumbs"]).reshape(n, 2, 2, 64) << np.uint8(4)
    return values.reshape(n, 16, 16)


def _q4_k(blocks: Structured, out: FloatArray) -> None:
    _scale_parts(k_four_bits(blocks), blocks, out)


def _q5_k(blocks: Structured, out: FloatArray) -> None:
    _scale_parts(k_five_bits(blocks), blocks, out)


def _q6_k(blocks: Structured, out: FloatArray) -> None:
    scales = blocks["scales"].astype(np.float32)
    scales *= _column(blocks["scale"])
    parts = out.reshape(len(blocks), 16, 16)
    np.subtract(k_six_bits(blocks), np.float32(32), out=parts)
    parts *= scales[:, :, None]


def _type(name: str, block: int, expand: Callable[[Structured, FloatArray], None], *fields: object) -> TensorType:
    return TensorType(name, np.dtype(list(fields)), block, expand)


_SCALE, _MINIMUM = ("scale", "<f2"), ("minimum", "<f2")

# By ggml type number.
TYPES: dict[int, TensorType] = {
    0: _type("F32", 1, _floats, ("values", "<f4", 1)),
    1: _type("F16", 1, _floats, ("values", "<f2", 1)),
    2: _type("Q4_0", BLOCK, _q4_0, _SCALE, ("nibbles", "u1", 16)),
    3: _type("Q4_1", BLOCK, _q4_1, _SCALE, _MINIMUM, ("nibbles", "u1", 16)),
    6: _type("Q5_0", BLOCK, _q5_0, _SCALE, ("fifth", "u1", 4), ("nibbles", "u1", 16)),
    7: _type("Q5_1", BLOCK, _q5_1, _SCALE, _MINIMUM, ("fifth", "u1", 4), ("nibbles", "u1", 16)),
    8: _type("Q8_0", BLOCK, _q8_0, _SCALE, ("values", "i1", BLOCK)),
    10: _type("Q2_K", _SUPER, _q2_k, ("scales", "u1", 16), ("crumbs", "u1", 64), _SCALE, _MINIMUM),
    11: _type("Q3_K", _SUPER, _q3_k, ("third", "u1", 32), ("crumbs", "u1", 64), ("scales", "u1", 12), _SCALE),
    12: _type("Q4_K", _SUPER, _q4_k, _SCALE, _MINIMUM, ("scales", "u1", 12), ("nibbles", "u1", 128)),
    13: _type(
        "Q5_K", _SUPER, _q5_k, _SCALE, _MINIMUM, ("scales", "u1", 12), ("fifth", "u1", 32), ("nibbles", "u1", 128)
    ),
    14: _type("Q6_K", _SUPER, _q6_k, ("nibbles", "u1", 128), ("crumbs", "u1", 64), ("scales", "i1", 16), _SCALE),
    20: _type("IQ4_NL", BLOCK, _iq4_nl, _SCALE, ("nibbles", "u1", 16)),
    23: _type(
        "IQ4_XS", _SUPER, _iq4_xs, _SCALE, ("scales_high", "<u2"), ("scales_low", "u1", 4), ("nibbles", "u1", 128)
    ),
    30: _type("BF16", 1, _bf16, ("values", "<u2", 1)),
}
