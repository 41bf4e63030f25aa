"""Blocks of GGUF tensor data to float32, vectorised over all blocks of a tensor.

The layouts are those of ggml's `block_q*` structs. The order of the float operations is the one of package `gguf`, so
that results are equal bit for bit; here they run over the whole tensor at once, which is several times faster.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32  # values in a block of the Q4 and Q8 families

_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])
_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", BLOCK // 2)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", BLOCK // 2)])


def _f32(data: Bytes) -> FloatArray:
    return data.view("<f4").astype(np.float32, copy=False)


def _f16(data: Bytes) -> FloatArray:
    return data.view("<f2").astype(np.float32)


def bfloat16(data: Bytes) -> FloatArray:
    """bfloat16 is the upper half of a float32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(data: Bytes) -> FloatArray:
    blocks = data.view(_Q8_0)
    out = blocks["values"].astype(np.float32)
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out.reshape(-1)


def _nibbles(packed: Bytes) -> FloatArray:
    """[blocks, 16] bytes -> [blocks, 32]: the low halves are the first 16 values, the high halves the last 16."""
    out = np.empty((len(packed), BLOCK), np.float32)
    np.bitwise_and(packed, 15, out=out[:, : BLOCK // 2], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, BLOCK // 2 :], casting="unsafe")
    return out


def _q4_0(data: Bytes) -> FloatArray:
    blocks = data.view(_Q4_0)
    out = _nibbles(blocks["nibbles"])
    out -= np.float32(8)
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out.reshape(-1)


def _q4_1(data: Bytes) -> FloatArray:
    blocks = data.view(_Q4_1)
    out = _nibbles(blocks["nibbles"])
    out *= blocks["scale"].astype(np.float32)[:, None]
    out += blocks["minimum"].astype(np.float32)[:, None]
    return out.reshape(-1)


# By the name of the ggml type.
DEQUANTISERS: dict[str, Callable[[Bytes], FloatArray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": bfloat16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}


def dequantise(data: Bytes, type_name: str) -> FloatArray:
    """The values of raw tensor bytes as a flat float32 array; it may be a view of `data`.

    Raises:
        NotImplementedError: when neither this module nor package `gguf` knows the type.
    """
    own = DEQUANTISERS.get(type_name)
    if own is not None:
        return own(data)
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    _, type_size = gguf.GGML_QUANT_SIZES[kind]
    rows = data.reshape(-1, type_size)
    flat: FloatArray = gguf.dequantize(rows, kind).reshape(-1)
    return flat
