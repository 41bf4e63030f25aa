"""Attention of prompt chunks over paged keys and values, as a numba kernel.

A work item is up to `TILE_COLUMNS` queries of one chunk and one key-value head (`work_items`); a query is a token and
one of the query heads that share the key-value head. Each query has a lane of the vectors: a key or value is read from
its page once for all of them, and only queries are transposed. The softmax is computed online (Milakov and Gimelshein,
2018), one tile of keys at a time, so scores stay in the L1 cache. Tiles that are invisible to all queries of an item
are skipped. Twin: `reference.paged_attention`.

A token's result does not depend on the chunk, bit for bit: keys that a query must not see have a weight of 0, which
changes no sum. On request it is that of the decode kernel, too. That takes longer, because the decode kernel adds the
products of a score in lanes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.attention.decode_tile import SUMMED_LANES
from fastgen.kernels.cpu.attention.prefill_tile import (
    STRIDE,
    add_total,
    exponentiate,
    fold,
    raise_highest,
    rescale,
    widen,
)
from fastgen.kernels.cpu.attention.prefill_tile import scores as scores_of
from fastgen.kernels.cpu.attention.work_items import PART, TILE
from fastgen.kernels.cpu.elements import ElementArray, is_float32, narrowed
from fastgen.kernels.cpu.jit import kernel, prange, serial
from fastgen.kernels.cpu.llvm_vectors import emitted
from fastgen.kernels.cpu.matmul.tile import ROWS, emit_continued_product, emit_product
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_product = emitted(partial(emit_product, ROWS))
_add_values = emitted(partial(emit_continued_product, ROWS))  # head sizes are multiples of its rows

_f32 = np.float32
_MASKED = np.finfo(np.float32).min  # below every score, but finite: minus itself it is 0, not NaN


@serial
def _mask(scores: FloatArray, tile: int, num_keys: int, first: IntArray, last: IntArray) -> None:
    """Mask all keys of a lane but those from its `first` to its `last`."""
    for j in range(num_keys):
        for lane in range(TILE_COLUMNS):
            if tile + j > last[lane] or tile + j < first[lane]:
                scores[j, lane] = _MASKED


@serial
def _squeeze(scores: FloatArray, num_keys: int, softcap: np.float32) -> None:
    """Bound scores to ± `softcap`."""
    for j in range(num_keys):
        for lane in range(TILE_COLUMNS):
            scores[j, lane] = softcap * _f32(math.tanh(scores[j, lane] / softcap))


@serial
def _softmax(
    scores: FloatArray, num_keys: int, highest: FloatArray, total: FloatArray, sums: FloatArray, tops: FloatArray
) -> None:
    """Set scores [num_keys, lanes] = exp(scores - running maximum).

    Update highest, total and the weighted `sums`. A lane that has seen only masked keys counts them fully, until its
    first visible key rescales them to 0. `tops` is scratch [lanes].
    """
    for lane in range(TILE_COLUMNS):
        tops[lane] = highest[lane]
    raise_highest(scores.ctypes.data, num_keys, tops.ctypes.data)
    grown = False
    for lane in range(TILE_COLUMNS):
        grown |= tops[lane] > highest[lane]
    if grown:
        rescale(highest.ctypes.data, tops.ctypes.data, total.ctypes.data, sums.shape[0], sums.ctypes.data)
    exponentiate(scores.ctypes.data, num_keys, highest.ctypes.data)
    rows = -(-num_keys // SUMMED_LANES) * SUMMED_LANES
    scores[num_keys:rows] = 0
    add_total(scores.ctypes.data, rows, total.ctypes.data)


@serial
def _load_tile(
    pages: ElementArray, tables: IntArray, table: int, head: int, tile: int, num_keys: int, wide: FloatArray
) -> None:
    """Widen a tile's keys or values to `wide` [TILE, head_dim], unless they are float32: these are used in place."""
    if not is_float32(pages):
        block_size, head_dim = pages.shape[2], pages.shape[3]
        rows = -(-num_keys // ROWS) * ROWS
        run = min(TILE, block_size)
        for first in range(0, rows, run):
            key = tile + first
            page = (tables[table + key // block_size] * pages.shape[1] + head) * block_size + key % block_size
            source, target = pages.ctypes.data + page * head_dim * pages.itemsize, wide[first].ctypes.data
            widen(pages, source, min(run, rows - first) * head_dim, target)


@serial
def _row(pages: ElementArray, tables: IntArray, table: int, head: int, tile: int, offset: int, wide: FloatArray) -> Any:
    """Return the address of row `offset` of a loaded tile, in float32. The other rows of its block follow."""
    line = pages.shape[3] * 4
    if not is_float32(pages):
        return wide.ctypes.data + offset * line
    block_size, at = pages.shape[2], tile + offset
    page = (tables[table + at // block_size] * pages.shape[1] + head) * block_size + at % block_size
    return pages.ctypes.data + page * line


@serial
def _attend_item(
    item: IntArray,
    queries: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    out: ElementArray,
    scale: np.float32,
    softcap: np.float32,
    sinks: FloatArray,
    as_decodes: bool,
) -> None:
    """Compute one item's rows of `out`."""
    row, num_tokens, context, table, head, first_lane, window = item
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group = queries.shape[1] // kv_heads
    num_lanes = min(TILE_COLUMNS, num_tokens * group - first_lane)
    line = head_dim * 4
    run = min(TILE, keys.shape[2])  # contiguous keys of a tile
    turned = np.zeros((head_dim, TILE_COLUMNS), np.float32)
    scores = np.empty((TILE, TILE_COLUMNS), np.float32)
    # Of the part of the context in progress, and of all parts before it, which begin with the sinks.
    sums, all_sums = np.zeros((2, head_dim, TILE_COLUMNS), np.float32)
    highest, all_highest = np.full((2, TILE_COLUMNS), _MASKED, np.float32)
    total, all_total = np.zeros(TILE_COLUMNS, np.float32), np.ones(TILE_COLUMNS, np.float32)
    tops = np.empty(TILE_COLUMNS, np.float32)
    wide = np.empty((TILE, head_dim), np.float32)
    first, last = np.empty(TILE_COLUMNS, np.int64), np.empty(TILE_COLUMNS, np.int64)
    for lane in range(TILE_COLUMNS):
        # Lanes beyond the chunk repeat its last query.
        token, g = divmod(first_lane + min(lane, num_lanes - 1), group)
        last[lane] = context + token
        first[lane] = max(0, last[lane] + 1 - window)
        all_highest[lane] = sinks[head * group + g]
        for d in range(head_dim):
            turned[d, lane] = queries[row + token, head * group + g, d] * scale
    end = last[TILE_COLUMNS - 1] + 1
    for tile in range(first[0] // TILE * TILE, end, TILE):
        num_keys = min(TILE, end - tile)
        _load_tile(keys, tables, table, head, tile, num_keys, wide)
        for offset in range(0, num_keys, ROWS):
            key, score = _row(keys, tables, table, head, tile, offset, wide), scores.ctypes.data + offset * STRIDE
            if as_decodes:
                scores_of(key, line, turned.ctypes.data, head_dim, score)
            else:
                _product(key, line, 4, turned.ctypes.data, head_dim, score, STRIDE, 0)
        if softcap > _f32(0):
            _squeeze(scores, num_keys, softcap)
        if tile + num_keys - 1 > last[0] or tile < first[TILE_COLUMNS - 1]:
            _mask(scores, tile, num_keys, first, last)
        _softmax(scores, num_keys, highest, total, sums, tops)
        # Skip slots before the first visible key: a weight of 0 does not mask infinity or NaN.
        begin = max(first[0] - tile, 0)
        _load_tile(values, tables, table, head, tile, num_keys, wide)
        for offset in range(begin // run * run, num_keys, run):
            skipped = max(begin - offset, 0)
            page = _row(values, tables, table, head, tile, offset + skipped, wide)
            weights = scores.ctypes.data + (offset + skipped) * STRIDE
            depth = min(run, num_keys - offset) - skipped
            for d in range(0, head_dim, ROWS):
                _add_values(page + d * 4, 4, line, weights, depth, sums.ctypes.data + d * STRIDE, STRIDE)
        if (tile + TILE) % PART == 0 or tile + TILE >= end:
            merged = all_highest.ctypes.data, all_total.ctypes.data, all_sums.ctypes.data
            fold(highest.ctypes.data, total.ctypes.data, sums.ctypes.data, head_dim, *merged)
            highest[:], total[:], sums[:] = _MASKED, _f32(0), _f32(0)
    for lane in range(num_lanes):
        token, g = divmod(first_lane + lane, group)
        inverse = _f32(1) / all_total[lane]
        for d in range(head_dim):
            out[row + token, head * group + g, d] = narrowed(all_sums[d, lane] * inverse, out)


@kernel("void(f4[:,:,::1], E[:,:,:,::1], E[:,:,:,::1], i8[::1], i8[:,::1], E[:,:,::1], f4, f4, f4[::1], b1)")
def attend_chunks(
    queries: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    items: IntArray,
    out: ElementArray,
    scale: np.float32,
    softcap: np.float32,
    sinks: FloatArray,
    as_decodes: bool,
) -> None:
    """Compute the attention of all prompt chunks of a step in one layer. All arrays are contiguous.

    Args:
        queries, out: [T, heads, head_dim]; rows of `out` that are in chunks are written. head_dim a multiple of 4.
        keys, values: the layer's cache, [blocks, kv heads, block size, head_dim], including the chunks' own; block size
            a power of two from 16.
        tables: all block tables, concatenated.
        items: see `work_items.cut_chunks`.
        scale: factor of the scores.
        softcap: bound of the scores, applied by tanh; 0 for no bound.
        sinks: [heads], an additional score in each softmax, without a value (Xiao et al., 2023); `decode.NO_SINK` for
            none.
        as_decodes: whether results must be those of `decode.attend_decodes`, bit for bit.
    """
    for n in prange(items.shape[0]):
        _attend_item(items[n], queries, keys, values, tables, out, scale, softcap, sinks, as_decodes)
