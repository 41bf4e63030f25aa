"""Attention of prompt chunks over paged keys and values, as a numba kernel.

A work item is up to `TILE_COLUMNS` queries of one chunk and one key-value head (`work_items`); a query is a token and
one of the query heads that share the key-value head. Each query has a lane of the vectors: a key or value is read from
its page once for all of them, and only queries are transposed. The softmax is computed online (Milakov and Gimelshein,
2018), one tile of keys at a time, so scores stay in the L1 cache. Tiles that are invisible to all queries of an item
are skipped. Twin: `reference.paged_attention`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.elements import ElementArray, is_float32, narrowed
from fastgen.kernels.cpu.jit import kernel, lowering, prange, serial
from fastgen.kernels.cpu.llvm_vectors import I64, Emitter, emitted
from fastgen.kernels.cpu.matmul.tile import ROWS, emit_product
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS, VECTORS, WIDTH

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

TILE = 64  # keys per softmax step

_product = emitted(partial(emit_product, ROWS))  # head sizes and block sizes are multiples of its rows

_f32 = np.float32
_MASKED = np.finfo(np.float32).min  # below every score, but finite: minus itself it is 0, not NaN
_STRIDE = TILE_COLUMNS * 4  # bytes from one row of scratch to the next


def _emit_highest(builder: Any, scores: Any, num_keys: Any, highest: Any) -> None:
    """Set highest [lanes] to the maximum of itself and scores [num_keys, lanes]."""
    emit = Emitter(builder, WIDTH)
    places = [emit.offset(highest, I64(vector), WIDTH * 4) for vector in range(VECTORS)]
    tops = [lowering.alloca_once_value(builder, emit.load(place)) for place in places]
    with lowering.for_range(builder, num_keys) as key:
        line = emit.offset(scores, key.index, _STRIDE)
        for vector, top in enumerate(tops):
            score = emit.load(emit.offset(line, I64(vector), WIDTH * 4))
            builder.store(emit.larger(score, builder.load(top)), top)
    for place, top in zip(places, tops, strict=True):
        emit.store(builder.load(top), place)


def _emit_powers(builder: Any, scores: Any, num_keys: Any, highest: Any, total: Any) -> None:
    """Set scores [num_keys, lanes] = exp(scores - highest [lanes]) and add their sum to total [lanes]."""
    emit = Emitter(builder, WIDTH)
    places = [emit.offset(total, I64(vector), WIDTH * 4) for vector in range(VECTORS)]
    totals = [lowering.alloca_once_value(builder, emit.load(place)) for place in places]
    tops = [emit.load(emit.offset(highest, I64(vector), WIDTH * 4)) for vector in range(VECTORS)]
    with lowering.for_range(builder, num_keys) as key:
        line = emit.offset(scores, key.index, _STRIDE)
        for vector in range(VECTORS):
            place = emit.offset(line, I64(vector), WIDTH * 4)
            power = emit.exp(emit.subtract(emit.load(place), tops[vector]))
            emit.store(power, place)
            builder.store(emit.add(power, builder.load(totals[vector])), totals[vector])
    for place, sum_ in zip(places, totals, strict=True):
        emit.store(builder.load(sum_), place)


def _emit_rescale(builder: Any, highest: Any, tops: Any, total: Any, depth: Any, sums: Any) -> None:
    """Set highest [lanes] to tops; multiply total [lanes] and sums [depth, lanes] by exp(highest - tops)."""
    emit = Emitter(builder, WIDTH)
    offsets = [I64(vector * WIDTH * 4) for vector in range(VECTORS)]
    corrections = []
    for offset in offsets:
        old, new, count = (builder.add(first, offset) for first in (highest, tops, total))
        top = emit.load(new)
        corrections.append(emit.exp(emit.subtract(emit.load(old), top)))
        emit.store(top, old)
        emit.store(emit.multiply(emit.load(count), corrections[-1]), count)
    with lowering.for_range(builder, depth) as row:
        line = emit.offset(sums, row.index, _STRIDE)
        for offset, correction in zip(offsets, corrections, strict=True):
            place = builder.add(line, offset)
            emit.store(emit.multiply(emit.load(place), correction), place)


def _emit_widen(builder: Any, element: Any, source: Any, count: Any, target: Any) -> None:
    """Set target [count] to source [count], elements, in float32; `count` is a multiple of WIDTH."""
    emit = Emitter(builder, WIDTH)
    with lowering.for_range(builder, builder.udiv(count, I64(WIDTH))) as step:
        place = emit.offset(source, step.index, WIDTH * element.bitwidth // 8)
        emit.store(emit.load_elements(place, element), emit.offset(target, step.index, WIDTH * 4))


_raise_highest, _exponentiate = emitted(_emit_highest), emitted(_emit_powers)
_rescale, _widen = emitted(_emit_rescale), emitted(_emit_widen)


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

    Update highest, total and the weighted `sums`. A lane that has seen only masked keys counts them fully until its
    first visible key rescales them to 0. `tops` is scratch [lanes].
    """
    for lane in range(TILE_COLUMNS):
        tops[lane] = highest[lane]
    _raise_highest(scores.ctypes.data, num_keys, tops.ctypes.data)
    grown = False
    for lane in range(TILE_COLUMNS):
        grown |= tops[lane] > highest[lane]
    if grown:
        _rescale(highest.ctypes.data, tops.ctypes.data, total.ctypes.data, sums.shape[0], sums.ctypes.data)
    _exponentiate(scores.ctypes.data, num_keys, highest.ctypes.data, total.ctypes.data)


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
            _widen(pages, source, min(run, rows - first) * head_dim, target)


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
) -> None:
    """Compute one item's rows of `out`."""
    row, num_tokens, context, table, head, first_lane, window = item
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    group = queries.shape[1] // kv_heads
    num_lanes = min(TILE_COLUMNS, num_tokens * group - first_lane)
    line = head_dim * 4
    run = min(TILE, keys.shape[2])  # contiguous keys of a tile
    turned = np.zeros((head_dim, TILE_COLUMNS), np.float32)
    sums = np.zeros((head_dim, TILE_COLUMNS), np.float32)
    scores = np.empty((TILE, TILE_COLUMNS), np.float32)
    highest, total = np.full(TILE_COLUMNS, _MASKED, np.float32), np.zeros(TILE_COLUMNS, np.float32)
    tops = np.empty(TILE_COLUMNS, np.float32)
    wide = np.empty((TILE, head_dim), np.float32)
    first, last = np.empty(TILE_COLUMNS, np.int64), np.empty(TILE_COLUMNS, np.int64)
    for lane in range(TILE_COLUMNS):
        # Lanes beyond the chunk repeat its last query.
        token, g = divmod(first_lane + min(lane, num_lanes - 1), group)
        last[lane] = context + token
        first[lane] = max(0, last[lane] + 1 - window)
        for d in range(head_dim):
            turned[d, lane] = queries[row + token, head * group + g, d] * scale
    end = last[TILE_COLUMNS - 1] + 1
    for tile in range(first[0] // TILE * TILE, end, TILE):
        num_keys = min(TILE, end - tile)
        _load_tile(keys, tables, table, head, tile, num_keys, wide)
        for offset in range(0, num_keys, ROWS):
            key, score = _row(keys, tables, table, head, tile, offset, wide), scores.ctypes.data + offset * _STRIDE
            _product(key, line, 4, turned.ctypes.data, head_dim, score, _STRIDE, 0)
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
            weights = scores.ctypes.data + (offset + skipped) * _STRIDE
            depth = min(run, num_keys - offset) - skipped
            for d in range(0, head_dim, ROWS):
                _product(page + d * 4, 4, line, weights, depth, sums.ctypes.data + d * _STRIDE, _STRIDE, 1)
    for lane in range(num_lanes):
        token, g = divmod(first_lane + lane, group)
        inverse = _f32(1) / total[lane]
        for d in range(head_dim):
            out[row + token, head * group + g, d] = narrowed(sums[d, lane] * inverse, out)


@kernel("void(f4[:,:,::1], E[:,:,:,::1], E[:,:,:,::1], i8[::1], i8[:,::1], E[:,:,::1], f4, f4)")
def attend_chunks(
    queries: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    items: IntArray,
    out: ElementArray,
    scale: np.float32,
    softcap: np.float32,
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
    """
    for n in prange(items.shape[0]):
        _attend_item(items[n], queries, keys, values, tables, out, scale, softcap)
