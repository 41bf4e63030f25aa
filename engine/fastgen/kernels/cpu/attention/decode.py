"""Attention of decodes (single tokens) over paged keys and values, as a numba kernel.

A work item is one decode, one key-value head and one range of its context. All query heads of a key-value head share
each load of a key or value. The softmax is computed online (Milakov and Gimelshein, 2018), one tile of keys at a time;
a context is split at multiples of `PART`, and its parts are merged at the end by their log-sum-exp. Twin:
`reference.paged_attention`.

The result depends on the query, the keys and the values only, bit for bit: neither on other sequences, nor on the
number of threads or the block size. The chunk kernel can compute the same sums in the same order (`prefill_tile`).

The same machine code serves every head size, group and block size, so it can be compiled ahead of time. Unrolling by
constants was not faster.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.attention.decode_tile import HEADS, KEYS, SUMMED_LANES, add_rest, weighted_sums
from fastgen.kernels.cpu.attention.decode_tile import scores as scores_of
from fastgen.kernels.cpu.attention.work_items import TILE
from fastgen.kernels.cpu.elements import ElementArray, narrowed, widened
from fastgen.kernels.cpu.jit import kernel, prange, serial, types
from fastgen.kernels.cpu.llvm_vectors import I32, I64, Emitter, emitted
from fastgen.kernels.cpu.vector_width import WIDTH

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Block sizes divide TILE or are multiples of it. Scores are computed for KEYS keys at a time.
assert TILE % SUMMED_LANES == 0

_f32 = np.float32
_MASKED = np.finfo(np.float32).min  # below every score, but finite: minus itself it is 0, not NaN
NO_SINK = _MASKED  # in place of a sink's score: its weight becomes 0


@serial
def _run(pages: ElementArray, tables: IntArray, table: int, head: int, key: int) -> Any:
    """Return the address of a key or value. The others of its block follow."""
    block_size = pages.shape[2]
    row = (tables[table + key // block_size] * pages.shape[1] + head) * block_size + key % block_size
    return pages.ctypes.data + row * pages.shape[3] * pages.itemsize


@serial
def _score_tile(
    query: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    table: int,
    head: int,
    tile: int,
    num_keys: int,
    scores: FloatArray,
) -> None:
    """Set scores [group, TILE] = query [group, head_dim] · keys of a tile, masked beyond `num_keys`.

    Prefetches the tile's values.
    """
    group, head_dim = query.shape
    whole = head_dim // WIDTH * WIDTH
    line = head_dim * keys.itemsize
    run = min(TILE, keys.shape[2])  # contiguous keys of a tile
    for first in range(0, num_keys, run):
        place = _run(keys, tables, table, head, tile + first)
        ahead = _run(values, tables, table, head, tile + first)
        count = -(-min(run, num_keys - first) // KEYS) * KEYS
        for g in range(0, group, HEADS):
            q, s = query.ctypes.data + g * head_dim * 4, scores.ctypes.data + (g * TILE + first) * 4
            scores_of(min(HEADS, group - g), keys, q, head_dim * 4, place, line, whole, count, s, TILE * 4, ahead)
            ahead = place
        if whole < head_dim:
            rest = place + whole * keys.itemsize
            for g in range(group):
                q, s = query.ctypes.data + (g * head_dim + whole) * 4, scores.ctypes.data + (g * TILE + first) * 4
                add_rest(keys, q, rest, line, head_dim - whole, count, s)
    for g in range(group):
        for j in range(num_keys, TILE):
            scores[g, j] = _MASKED


@serial
def _restrict_tile(scores: FloatArray, num_keys: int, num_hidden: int, softcap: np.float32) -> None:
    """Bound a tile's scores to ± `softcap` if it is above 0, and mask the first `num_hidden`."""
    for g in range(scores.shape[0]):
        if softcap > _f32(0):
            for j in range(num_keys):
                scores[g, j] = softcap * _f32(math.tanh(scores[g, j] / softcap))
        for j in range(num_hidden):
            scores[g, j] = _MASKED


def _emit_highest(builder: Any, scores: Any) -> Any:
    """Return the maximum of scores [TILE], given their address."""
    emit = Emitter(builder, SUMMED_LANES)
    vectors = [emit.load(emit.offset(scores, I64(step), SUMMED_LANES * 4)) for step in range(TILE // SUMMED_LANES)]
    return emit.largest(reduce(emit.larger, vectors))


def _emit_powers(builder: Any, scores: Any, highest: Any) -> None:
    """Set scores [TILE] = exp(scores - highest), given the address of the scores."""
    emit = Emitter(builder, SUMMED_LANES)
    top = emit.spread(highest)
    for step in range(TILE // SUMMED_LANES):
        place = emit.offset(scores, I64(step), SUMMED_LANES * 4)
        emit.store(emit.exp(emit.subtract(emit.load(place), top)), place)


def _emit_total(builder: Any, scores: Any) -> Any:
    """Return the sum of scores [TILE], given their address, in the order of `prefill_tile.add_total`."""
    emit = Emitter(builder, SUMMED_LANES)
    vectors = [emit.load(emit.offset(scores, I64(step), SUMMED_LANES * 4)) for step in range(TILE // SUMMED_LANES)]
    return emit.sum_of_lanes(reduce(emit.add, vectors))


def _emit_power(builder: Any, x: Any) -> Any:
    """Return e^x, as `Emitter.exp` computes it in every lane."""
    emit = Emitter(builder, 1)
    return builder.extract_element(emit.exp(emit.spread(x)), I32(0))


def _emit_fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, as `Emitter.fused` computes it in every lane."""
    emit = Emitter(builder, 1)
    return builder.extract_element(emit.fused(emit.spread(a), emit.spread(b), emit.spread(c)), I32(0))


_highest = emitted(_emit_highest, returns=types.float32)
_exponentiate = emitted(_emit_powers)
_total = emitted(_emit_total, returns=types.float32)
_power, _fused = emitted(_emit_power, returns=types.float32), emitted(_emit_fused, returns=types.float32)


@serial
def _softmax_tile(
    scores: FloatArray,
    num_keys: int,
    num_hidden: int,
    state: FloatArray,
    acc: FloatArray,
) -> None:
    """Set scores = exp(scores - running maximum), 0 for hidden keys, and update `state` and `acc`.

    The first `num_hidden` keys of the tile and those from `num_keys` on are hidden. state [group, 2] holds the running
    maximum and the sum of exponentials.
    """
    for g in range(scores.shape[0]):
        highest = max(state[g, 0], _highest(scores.ctypes.data + g * TILE * 4))
        if highest > state[g, 0]:
            correction = _power(state[g, 0] - highest)
            state[g, 0] = highest
            state[g, 1] *= correction
            for d in range(acc.shape[1]):
                acc[g, d] *= correction
        _exponentiate(scores.ctypes.data + g * TILE * 4, highest)
        for j in range(num_hidden):
            scores[g, j] = _f32(0)
        for j in range(num_keys, TILE):
            scores[g, j] = _f32(0)
        state[g, 1] += _total(scores.ctypes.data + g * TILE * 4)


@serial
def _add_values(
    scores: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    table: int,
    head: int,
    tile: int,
    num_hidden: int,
    num_keys: int,
    end: int,
    acc: FloatArray,
) -> None:
    """Add scores · values of a tile's keys from `num_hidden` to `num_keys` to acc [group, head_dim].

    Other slots are skipped, because a weight of 0 does not mask infinity or NaN. Prefetches the keys of the next tile
    if it begins before `end`.
    """
    group, head_dim = acc.shape
    whole = head_dim // WIDTH * WIDTH
    line = head_dim * values.itemsize
    run = min(TILE, values.shape[2])
    for first in range(num_hidden // run * run, num_keys, run):
        begin = max(num_hidden - first, 0)
        count = min(run, num_keys - first) - begin
        place = _run(values, tables, table, head, tile + first + begin)
        ahead = place
        if tile + TILE + first < end:
            ahead = _run(keys, tables, table, head, tile + TILE + first)
        for g in range(0, group, HEADS):
            weights, sums = scores.ctypes.data + (g * TILE + first + begin) * 4, acc.ctypes.data + g * head_dim * 4
            heads = min(HEADS, group - g)
            weighted_sums(heads, values, weights, TILE * 4, place, line, whole, count, sums, head_dim * 4, ahead)
            ahead = place
        if whole < head_dim:
            block, offset = tables[table + (tile + first) // values.shape[2]], (tile + first) % values.shape[2] + begin
            for g in range(group):
                for j in range(count):
                    weight = scores[g, first + begin + j]
                    for d in range(whole, head_dim):
                        acc[g, d] += weight * widened(values[block, head, offset + j, d])


@serial
def _attend_item(
    n: int,
    items: IntArray,
    queries: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    parts: FloatArray,
    out: ElementArray,
    scale: np.float32,
    softcap: np.float32,
    sinks: FloatArray,
) -> None:
    """Compute one item into `out`, or into its part without the sinks."""
    row, head, table = items[n, 0], items[n, 1], items[n, 2]
    begin, end, part, visible = items[n, 3], items[n, 4], items[n, 5], items[n, 6]
    group, head_dim = parts.shape[1], keys.shape[3]
    query = np.empty((group, head_dim), np.float32)
    scores = np.empty((group, TILE), np.float32)
    acc = np.empty((group, head_dim), np.float32)
    state = np.empty((group, 2), np.float32)
    for g in range(group):
        state[g, 0], state[g, 1] = _MASKED, _f32(0)
        for d in range(head_dim):
            query[g, d] = queries[row, head * group + g, d] * scale
            acc[g, d] = _f32(0)
    for tile in range(begin, end, TILE):
        num_keys = min(TILE, end - tile)
        _score_tile(query, keys, values, tables, table, head, tile, num_keys, scores)
        num_hidden = max(visible - tile, 0)
        if num_hidden > 0 or softcap > _f32(0):
            _restrict_tile(scores, num_keys, num_hidden, softcap)
        _softmax_tile(scores, num_keys, num_hidden, state, acc)
        _add_values(scores, keys, values, tables, table, head, tile, num_hidden, num_keys, end, acc)
    for g in range(group):
        if part < 0:
            # As `_merge_parts` with one part.
            sink = sinks[head * group + g]
            highest = max(sink, state[g, 0])
            added = _power(state[g, 0] - highest)
            inverse = _f32(1) / _fused(state[g, 1], added, _power(sink - highest))
            for d in range(head_dim):
                out[row, head * group + g, d] = narrowed(_fused(acc[g, d], added, _f32(0)) * inverse, out)
        else:
            for d in range(head_dim):
                parts[part, g, d] = acc[g, d]
            parts[part, g, head_dim], parts[part, g, head_dim + 1] = state[g, 0], state[g, 1]


@serial
def _merge_parts(merges: IntArray, parts: FloatArray, out: ElementArray, sinks: FloatArray) -> None:
    """Merge the parts of split contexts and the sinks; `parts` hold acc, maximum score and sum of exponentials."""
    group, head_dim = parts.shape[1], out.shape[2]
    merged = np.empty(head_dim, np.float32)
    for m in range(merges.shape[0]):
        row, head, first, count = merges[m, 0], merges[m, 1], merges[m, 2], merges[m, 3]
        for g in range(group):
            highest, total = sinks[head * group + g], _f32(1)
            for d in range(head_dim):
                merged[d] = _f32(0)
            for p in range(first, first + count):
                # As `prefill_tile.fold`.
                top = max(highest, parts[p, g, head_dim])
                kept, added = _power(highest - top), _power(parts[p, g, head_dim] - top)
                total = _fused(parts[p, g, head_dim + 1], added, total * kept)
                for d in range(head_dim):
                    merged[d] = _fused(parts[p, g, d], added, merged[d] * kept)
                highest = top
            inverse = _f32(1) / total
            for d in range(head_dim):
                out[row, head * group + g, d] = narrowed(merged[d] * inverse, out)


@kernel(
    "void(f4[:,:,::1], E[:,:,:,::1], E[:,:,:,::1], i8[::1], i8[:,::1], i8[:,::1], f4[:,:,::1], E[:,:,::1], f4, f4, "
    "f4[::1])"
)
def attend_decodes(
    queries: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    tables: IntArray,
    items: IntArray,
    merges: IntArray,
    parts: FloatArray,
    out: ElementArray,
    scale: np.float32,
    softcap: np.float32,
    sinks: FloatArray,
) -> None:
    """Compute the attention of all decodes of a step in one layer. All arrays are contiguous.

    Args:
        queries, out: [T, heads, head_dim]; rows of `out` that are decodes are written.
        keys, values: the layer's cache, [blocks, kv heads, block size, head_dim]; block size a power of two from 16.
        tables: all block tables, concatenated.
        items, merges: see `work_items.DecodeItems`.
        parts: scratch [p, query heads per kv head, head_dim + 2]; its second dimension is read even if p is 0.
        scale: factor of the scores.
        softcap: bound of the scores, applied by tanh; 0 for no bound.
        sinks: [heads], an additional score in each softmax, without a value (Xiao et al., 2023); `NO_SINK` for none.
    """
    for n in prange(items.shape[0]):
        _attend_item(n, items, queries, keys, values, tables, parts, out, scale, softcap, sinks)
    _merge_parts(merges, parts, out, sinks)
