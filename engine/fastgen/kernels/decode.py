"""Attention of single tokens over paged keys and values (decodes), as a numba kernel.

The work is cut into items: one decode, one key-value head, one range of its context. All query heads of a key-value
head share each load of a key or value. Softmax runs on line (Milakov and Gimelshein, 2018), a tile of keys at a time;
the parts of a context that was split are merged at the end by their log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from fastgen.kernels.jit import kernel

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
DecodeKernel = Callable[..., None]

TILE = 64  # keys per softmax step

_f32 = np.float32
_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-1e30)

_SIGNATURE = (
    "void(f4[:,:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1], i8[:,::1], i8[:,::1], f4[:,:,::1], f4[:,:,::1], f4)"
)


@kernel(parallel=False)
def exponentials(row: FloatArray, maximum: np.float32, powers: FloatArray, exponents: Any) -> np.float32:
    """row <- exp(row - maximum) for TILE values; returns their sum. `exponents` is `powers` seen as int32."""
    for i in range(TILE):
        x = max((row[i] - maximum) * _LOG2E, _f32(-126))
        whole = np.floor(x + _f32(0.5))
        f = x - whole
        p = _f32(1.5403530e-4)
        p = p * f + _f32(1.3333558e-3)
        p = p * f + _f32(9.6181291e-3)
        p = p * f + _f32(5.5504109e-2)
        p = p * f + _f32(2.4022651e-1)
        p = p * f + _f32(6.9314718e-1)
        p = p * f + _f32(1)
        exponents[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        row[i] = p
    total = _f32(0)
    for i in range(TILE):
        value = row[i] * powers[i]
        row[i] = value
        total += value
    return total


@functools.cache
def decode_kernel(head_dim: int, group: int, block_size: int) -> DecodeKernel:
    """The decode kernel for `group` query heads per key-value head: constants, so that LLVM unrolls its inner loops.

    The kernel's arguments, float32 and int64, contiguous:
        queries [T, heads, head_dim]; keys, values [blocks, kv heads, block_size, head_dim];
        tables [..]: all block tables, one after another;
        items [n, 6]: row of the query, kv head, where its table begins, first and last key (exclusive), part or -1;
        merges [m, 4]: row, kv head, first part, number of parts;
        parts [p, group, head_dim + 2]: scratch; out [T, heads, head_dim]: written; scale: on the scores.
    """
    run = min(TILE, block_size)  # keys of a tile that lie side by side
    D, G = head_dim, group

    @kernel(_SIGNATURE)
    def attend(
        queries: FloatArray,
        keys: FloatArray,
        values: FloatArray,
        tables: IntArray,
        items: IntArray,
        merges: IntArray,
        parts: FloatArray,
        out: FloatArray,
        scale: np.float32,
    ) -> None:
        for n in prange(items.shape[0]):
            row, head, table = items[n, 0], items[n, 1], items[n, 2]
            begin, end, part = items[n, 3], items[n, 4], items[n, 5]
            query = np.empty((G, D), np.float32)
            scores = np.empty((G, TILE), np.float32)
            acc = np.zeros((G, D), np.float32)
            powers = np.empty(TILE, np.float32)
            exponents = powers.view(np.int32)
            maximum = np.full(G, _MASKED)
            total = np.zeros(G, np.float32)
            for g in range(G):
                for d in range(D):
                    query[g, d] = queries[row, head * G + g, d] * scale
            for tile in range(begin, end, TILE):
                num_keys = min(TILE, end - tile)
                for first in range(0, num_keys, run):
                    block = tables[table + (tile + first) // block_size]
                    offset = (tile + first) % block_size
                    for j in range(run):
                        for g in range(G):
                            dot = _f32(0)
                            for d in range(D):
                                dot += query[g, d] * keys[block, head, offset + j, d]
                            scores[g, first + j] = dot
                for g in range(G):
                    for j in range(num_keys, TILE):
                        scores[g, j] = _MASKED
                    highest = maximum[g]
                    for j in range(TILE):
                        highest = max(highest, scores[g, j])
                    if highest > maximum[g]:
                        correction = _f32(math.exp(maximum[g] - highest))
                        total[g] *= correction
                        for d in range(D):
                            acc[g, d] *= correction
                        maximum[g] = highest
                    total[g] += exponentials(scores[g], highest, powers, exponents)
                    for j in range(num_keys, TILE):
                        scores[g, j] = _f32(0)
                for first in range(0, num_keys, run):
                    block = tables[table + (tile + first) // block_size]
                    offset = (tile + first) % block_size
                    for j in range(0, run, 8):
                        o = offset + j
                        for g in range(G):
                            p0, p1 = scores[g, first + j], scores[g, first + j + 1]
                            p2, p3 = scores[g, first + j + 2], scores[g, first + j + 3]
                            p4, p5 = scores[g, first + j + 4], scores[g, first + j + 5]
                            p6, p7 = scores[g, first + j + 6], scores[g, first + j + 7]
                            for d in range(D):
                                acc[g, d] += (
                                    p0 * values[block, head, o, d]
                                    + p1 * values[block, head, o + 1, d]
                                    + p2 * values[block, head, o + 2, d]
                                    + p3 * values[block, head, o + 3, d]
                                    + p4 * values[block, head, o + 4, d]
                                    + p5 * values[block, head, o + 5, d]
                                    + p6 * values[block, head, o + 6, d]
                                    + p7 * values[block, head, o + 7, d]
                                )
            if part < 0:
                for g in range(G):
                    inverse = _f32(1) / total[g]
                    for d in range(D):
                        out[row, head * G + g, d] = acc[g, d] * inverse
            else:
                for g in range(G):
                    for d in range(D):
                        parts[part, g, d] = acc[g, d]
                    parts[part, g, D] = maximum[g]
                    parts[part, g, D + 1] = total[g]
        for m in range(merges.shape[0]):
            row, head, first, count = merges[m, 0], merges[m, 1], merges[m, 2], merges[m, 3]
            for g in range(G):
                highest = _MASKED
                for p in range(first, first + count):
                    highest = max(highest, parts[p, g, D])
                weight_sum = _f32(0)
                for d in range(D):
                    out[row, head * G + g, d] = _f32(0)
                for p in range(first, first + count):
                    weight = _f32(math.exp(parts[p, g, D] - highest))
                    weight_sum += weight * parts[p, g, D + 1]
                    for d in range(D):
                        out[row, head * G + g, d] += weight * parts[p, g, d]
                inverse = _f32(1) / weight_sum
                for d in range(D):
                    out[row, head * G + g, d] *= inverse

    return attend
