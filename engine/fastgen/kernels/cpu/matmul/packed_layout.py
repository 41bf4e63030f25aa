"""Memory layout of matrices with values of four to six bits. Importing this compiles nothing.

A block of 32 values of one output is as many words of 32 bits as a value has bits. Byte j of the first sixteen bytes
holds the lower four bits of value j, and above them those of value 16 + j. A fifth bit follows in a word: its byte b
has that of value 4 t + b at place t. Fifth and sixth bits follow in two words, one for the values 0 to 15 and one for
16 to 31: byte b has both bits of the word's value 4 t + b at places 2 t and 2 t + 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, BYTES, TILE_LANES, in_groups

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_HALF = BLOCK // 2
_TURNS = BLOCK // BYTES  # products of four bytes in a block


def packed_words(values: Bytes, bits: int) -> Words:
    """Pack values [rows, columns] to words [rows, blocks * bits]."""
    rows = len(values)
    parts = values.reshape(rows, -1, 2, _HALF)
    lower = parts[:, :, 0] & np.uint8(15) | parts[:, :, 1] << np.uint8(4)
    planes = [lower.view(np.uint32)]
    upper = (values >> np.uint8(4)).reshape(rows, -1, _TURNS, BYTES)
    if bits == 5:
        planes.append(_gathered(upper, 1).view(np.uint32))
    elif bits == 6:
        planes += [_gathered(half, 2).view(np.uint32) for half in np.split(upper, 2, axis=2)]
    return np.concatenate(planes, axis=2).reshape(rows, -1)


def _gathered(upper: Bytes, width: int) -> Bytes:
    """Put the bits of turns [rows, blocks, turns, BYTES], `width` of each, into bytes [rows, blocks, BYTES]."""
    out = np.zeros((*upper.shape[:2], BYTES), np.uint8)
    for turn in range(upper.shape[2]):
        out |= upper[:, :, turn] << np.uint8(turn * width)
    return out


def unpacked(words: Words, bits: int) -> Bytes:
    """Undo `packed_words`."""
    rows = len(words)
    blocks = words.reshape(rows, -1, bits)
    lower = np.ascontiguousarray(blocks[:, :, :4]).view(np.uint8)  # [rows, blocks, 16]
    values = np.concatenate([lower & np.uint8(15), lower >> np.uint8(4)], axis=2)
    width = bits - 4
    for half in range(width):
        upper = np.ascontiguousarray(blocks[:, :, 4 + half : 5 + half]).view(np.uint8)  # [rows, blocks, BYTES]
        for turn in range(_TURNS // width):
            first = (half * _TURNS // width + turn) * BYTES
            mask = np.uint8((1 << width) - 1)
            values[:, :, first : first + BYTES] |= (upper >> np.uint8(turn * width) & mask) << np.uint8(4)
    return values.reshape(rows, -1)


def in_word_groups(values: Bytes, bits: int) -> Words:
    """Pack values [out, in] to [out / TILE_LANES rounded up, blocks * bits, TILE_LANES]."""
    words = packed_words(values, bits)
    return in_groups(words, words.shape[1], TILE_LANES)
