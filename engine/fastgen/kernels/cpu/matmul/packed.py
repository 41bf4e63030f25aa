"""Products of weights of four to six bits with activations quantised to int8, on CPUs.

Sums of a block are integers (`byte_products`), so they are exact and the same on all processors. A sum starts at minus
the weights' offset times the sum of the block's inputs. It is multiplied with the scales of the weights and of the
inputs; minimums are multiplied with the sum of the inputs; both are added in float32, block by block.

A single row unpacks weights in registers. More rows share a panel: some blocks of a group of outputs, which are
unpacked once and stay in the L1 cache while all rows use them; meanwhile, the weights of the next panel are prefetched.
The order of additions is the same, so a row's result does not depend on other rows. Twin in plain torch:
`reference.packed_product`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.elements import ElementArray
from fastgen.kernels.cpu.jit import compile_for_bfloat16, kernel, lowering, prange, serial
from fastgen.kernels.cpu.llvm_vectors import F32, I32, I64, Emitter, emitted, emitted_by_count, spread_integer
from fastgen.kernels.cpu.matmul.byte_products import WORD_LANES, WORD_VECTOR, add_byte_products
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, BYTES, TILE_LANES
from fastgen.kernels.cpu.matmul.packed_weights import GROUP_VECTORS, LINE, TURNS, PackedWeights
from fastgen.kernels.cpu.matmul.quantise import HALVES, quantised
from fastgen.kernels.cpu.vector_width import CACHE_LINE, has_byte_products, has_wide_vectors

# Rows per tile, at most: AVX2 has registers for two. Elsewhere the code of a tile is long.
ROWS = 4 if has_wide_vectors() else 2 if has_byte_products(256) else 1
_DEPTH = 12  # blocks of a panel: 18 KiB of bytes, and up to 7 of factors
_ROWS_TOGETHER = 256  # that share a panel: their sums take 48 KiB
_PANEL = _DEPTH * (TURNS + HALVES + 1)  # lines of bytes, scales and minimums


def _emit_row(
    bits: int, builder: Any, inputs: Any, input_scales: Any, input_sums: Any, words: Any, halves: Any, steps: Any,
    span: Any, minimum_halves: Any, minimum_steps: Any, minimum_span: Any, offset: Any, blocks: Any, totals: Any,
) -> None:  # fmt: skip
    """Compute totals [TILE_LANES] = quantised inputs [blocks * BLOCK] times one group's weights.

    Arguments are addresses, but the spans, `offset` and `blocks`.
    """
    emit = Emitter(builder, WORD_LANES)
    weights = PackedWeights(bits, words, halves, steps, span, minimum_halves, minimum_steps, minimum_span)
    places = [emit.places(GROUP_VECTORS)]
    with lowering.for_range(builder, blocks) as step:
        packed = weights.words_of(emit, step.index)
        loaded = _load_rows(emit, 1, inputs, input_scales, input_sums, step.index, blocks)
        for part in range(weights.parts):
            _add_part(
                emit, loaded, places, part, weights.parts, offset,
                lambda turn: [weights.bytes_of(builder, packed[vector], turn) for vector in range(GROUP_VECTORS)],
                weights.scales(emit, step.index, part),
            )  # fmt: skip
        with builder.if_then(builder.icmp_unsigned("!=", minimum_halves, I64(0))):
            _subtract_minimums(emit, loaded, places, weights.minimums(emit, step.index))
    _store(emit, places, totals)


def _emit_unpack(
    bits: int, builder: Any, words: Any, halves: Any, steps: Any, span: Any, minimum_halves: Any, minimum_steps: Any,
    minimum_span: Any, first: Any, count: Any, values: Any, scales: Any, minimums: Any,
) -> None:  # fmt: skip
    """Unpack the blocks from `first` on to a panel.

    Its arrays are values, bytes [count, BLOCK / BYTES, TILE_LANES, BYTES], scales, float32 [count, parts, TILE_LANES],
    and minimums, float32 [count, TILE_LANES], if there are any. Arguments are addresses, but the spans, `first` and
    `count`.
    """
    emit = Emitter(builder, WORD_LANES)
    weights = PackedWeights(bits, words, halves, steps, span, minimum_halves, minimum_steps, minimum_span)

    def store(vectors: list[Any], address: Any, index: Any) -> None:
        line = emit.offset(address, index, LINE)
        for vector, each in enumerate(vectors):
            emit.store(each, emit.offset(line, I64(vector), WORD_LANES * 4))

    with lowering.for_range(builder, count) as step:
        block = builder.add(first, step.index)
        packed = weights.words_of(emit, block)
        for turn in range(TURNS):
            unpacked = [weights.bytes_of(builder, packed[vector], turn) for vector in range(GROUP_VECTORS)]
            store(unpacked, values, builder.add(builder.mul(step.index, I64(TURNS)), I64(turn)))
        for part in range(weights.parts):
            place = builder.add(builder.mul(step.index, I64(weights.parts)), I64(part))
            store(weights.scales(emit, block, part), scales, place)
        with builder.if_then(builder.icmp_unsigned("!=", minimum_halves, I64(0))):
            store(weights.minimums(emit, block), minimums, step.index)


def _emit_tile(
    parts: int, rows: int, builder: Any, inputs: Any, input_scales: Any, input_sums: Any, stride: Any, values: Any,
    scales: Any, minimums: Any, offset: Any, ahead: Any, lines: Any, first: Any, count: Any, totals: Any,
) -> None:  # fmt: skip
    """Add to totals [rows, TILE_LANES] the quantised inputs [rows, count * BLOCK] times a panel.

    Arguments are addresses, `minimums` 0 if there are none, but `stride`: blocks of a row; `offset`; `lines`: cache
    lines of a block of packed weights; `first`: the panel's first block, with which the sums begin if it is 0; `count`.
    The packed weights at `ahead`, unless it is 0, are prefetched for the next panel.
    """
    emit = Emitter(builder, WORD_LANES)
    places = [emit.places(GROUP_VECTORS) for _ in range(rows)]
    with builder.if_then(builder.icmp_unsigned("!=", first, I64(0))):
        for row, vectors in enumerate(places):
            for vector, place in enumerate(vectors):
                builder.store(emit.load(_sum_at(emit, totals, row, vector)), place)
    with lowering.for_range(builder, count) as step:
        block = step.index
        loaded = _load_rows(emit, rows, inputs, input_scales, input_sums, block, stride)
        with builder.if_then(builder.icmp_unsigned("!=", ahead, I64(0))):
            following = emit.offset(ahead, block, builder.mul(lines, I64(CACHE_LINE)))
            with lowering.for_range(builder, lines) as line_ahead:
                emit.prefetch(emit.offset(following, line_ahead.index, CACHE_LINE), locality=2)
        line = emit.offset(values, block, TURNS * LINE)
        for part in range(parts):
            place = builder.add(builder.mul(block, I64(parts)), I64(part))
            _add_part(
                emit, loaded, places, part, parts, offset,
                lambda turn: _vectors(emit, line, I64(turn), WORD_VECTOR),
                _vectors(emit, scales, place),
            )  # fmt: skip
        with builder.if_then(builder.icmp_unsigned("!=", minimums, I64(0))):
            _subtract_minimums(emit, loaded, places, _vectors(emit, minimums, block))
    _store(emit, places, totals)


class _Row:
    """A block of a row's inputs: its address, its scale, and the sums of its halves."""

    __slots__ = ("address", "scale", "sums")

    def __init__(self, address: Any, scale: Any, sums: list[Any]) -> None:
        self.address, self.scale, self.sums = address, scale, sums

    @classmethod
    def load(cls, emit: Emitter, inputs: Any, scales: Any, sums: Any, block: Any) -> _Row:
        """Load a block, given the addresses of the first one."""
        place = emit.offset(sums, block, HALVES * 4)
        return cls(
            emit.offset(inputs, block, BLOCK),
            emit.load(emit.offset(scales, block, 4), F32),
            [emit.load(emit.offset(place, I64(half), 4), I32) for half in range(HALVES)],
        )

    def sum(self, builder: Any, part: int, parts: int) -> Any:
        """Return the sum of a part of the block."""
        return self.sums[part] if parts > 1 else builder.add(*self.sums)


def _load_rows(emit: Emitter, rows: int, inputs: Any, scales: Any, sums: Any, block: Any, stride: Any) -> list[_Row]:
    """Load a block of each row, which has `stride` blocks."""
    blocks = [emit.builder.add(block, emit.builder.mul(stride, I64(row))) for row in range(rows)]
    return [_Row.load(emit, inputs, scales, sums, each) for each in blocks]


def _add_part(
    emit: Emitter, rows: list[_Row], places: list[list[Any]], part: int, parts: int, offset: Any, weights: Any,
    scales: list[Any],
) -> None:  # fmt: skip
    """Add the products of a part of a block to the sums of rows; `weights(turn)` returns the vectors of a turn."""
    builder = emit.builder
    negative = builder.sub(I32(0), builder.trunc(offset, I32))
    starts = [builder.mul(row.sum(builder, part, parts), negative) for row in rows]
    sums = [[spread_integer(builder, start, WORD_VECTOR)] * GROUP_VECTORS for start in starts]
    for turn in range(part * TURNS // parts, (part + 1) * TURNS // parts):
        vectors = weights(turn)
        for number, row in enumerate(rows):
            four = emit.load(builder.add(row.address, I64(turn * BYTES)), I32)
            spread = spread_integer(builder, four, WORD_VECTOR)
            sums[number] = [
                add_byte_products(builder, total, vector, spread)
                for total, vector in zip(sums[number], vectors, strict=True)
            ]
    for row, integers, totals in zip(rows, sums, places, strict=True):
        scale = emit.spread(row.scale)
        for total, each, factor in zip(totals, integers, scales, strict=True):
            emit.add_product(total, builder.sitofp(each, emit.floats), emit.multiply(factor, scale))


def _subtract_minimums(emit: Emitter, rows: list[_Row], places: list[list[Any]], minimums: list[Any]) -> None:
    """Subtract the minimums, times the sum of a block's inputs, from the sums of rows."""
    builder = emit.builder
    for row, totals in zip(rows, places, strict=True):
        total_input = builder.fmul(builder.sitofp(row.sum(builder, 0, 1), F32), row.scale)
        negated = emit.spread(builder.fsub(F32(-0.0), total_input))
        for total, factor in zip(totals, minimums, strict=True):
            emit.add_product(total, factor, negated)


def _vectors(emit: Emitter, address: Any, line: Any, kind: Any = None) -> list[Any]:
    """Load the vectors of a line of all outputs."""
    first = emit.offset(address, line, LINE)
    return [emit.load(emit.offset(first, I64(vector), WORD_LANES * 4), kind) for vector in range(GROUP_VECTORS)]


def _sum_at(emit: Emitter, totals: Any, row: int, vector: int) -> Any:
    return emit.builder.add(totals, I64(row * LINE + vector * WORD_LANES * 4))


def _store(emit: Emitter, places: list[list[Any]], totals: Any) -> None:
    """Store the sums of rows to totals [rows, TILE_LANES]."""
    for row, vectors in enumerate(places):
        for vector, place in enumerate(vectors):
            emit.store(emit.builder.load(place), _sum_at(emit, totals, row, vector))


def _emit_result(builder: Any, element: Any, totals: Any, out: Any) -> None:
    """Store totals [TILE_LANES] as elements."""
    emit = Emitter(builder, WORD_LANES)
    for vector in range(GROUP_VECTORS):
        line = emit.offset(out, I64(vector), WORD_LANES * element.bitwidth // 8)
        emit.store_elements(emit.load(_sum_at(emit, totals, 0, vector)), line, element)


def _tile_of(parts: int) -> Any:
    """Return the function that computes a tile of up to `ROWS` rows, given their number first."""
    if ROWS > 1:
        return emitted_by_count(partial(_emit_tile, parts))
    one = emitted(partial(_emit_tile, parts, 1))

    def call(_count: int, *arguments: Any) -> None:
        one(*arguments)

    return serial(call)


def _by_bits(emit: Callable[..., Any]) -> Any:
    """Return a function for kernels whose first argument is the bits of a weight, for which `emit` emits the code."""
    four, five, six = (emitted(partial(emit, bits)) for bits in (4, 5, 6))

    def call(bits: int, *arguments: Any) -> None:
        if bits == 4:
            four(*arguments)
        elif bits == 5:
            five(*arguments)
        else:
            six(*arguments)

    return serial(call)


_row, _unpack = _by_bits(_emit_row), _by_bits(_emit_unpack)
_tile_of_whole, _tile_of_halves = (_tile_of(parts) for parts in (1, HALVES))
_write = emitted(_emit_result)


@serial
def _tile(parts: int, *arguments: Any) -> None:
    """Compute a tile with weights whose blocks have `parts` scales."""
    if parts == 1:
        _tile_of_whole(*arguments)
    else:
        _tile_of_halves(*arguments)


@kernel("void(i8, E[:,::1], u4[:,:,::1], u2[:,:,::1], i1[:,:,::1], u2[:,:,::1], i1[:,:,::1], i8, E[:,::1])")
def multiply(
    bits: int,
    x: ElementArray,
    words: npt.NDArray[np.uint32],
    halves: npt.NDArray[np.uint16],
    steps: npt.NDArray[np.int8],
    minimum_halves: npt.NDArray[np.uint16],
    minimum_steps: npt.NDArray[np.int8],
    offset: int,
    out: ElementArray,
) -> None:
    """Compute out [T, groups * TILE_LANES] = x [T, blocks * BLOCK], quantised, times weights.

    Args:
        bits: of a weight: 4, 5 or 6.
        x, out: activations.
        words: [groups, blocks * bits, TILE_LANES], see `packed_layout`.
        halves: bits of float16 [groups, n, TILE_LANES], one for several scaled parts: blocks, or halves of six bits.
        steps: [groups, scaled parts, TILE_LANES], or empty if all are 1.
        minimum_halves, minimum_steps: likewise for blocks; both empty without minimums.
        offset: subtracted from each weight.
    """
    rows, blocks = x.shape[0], x.shape[1] // BLOCK
    inputs, input_scales, sums = quantised(x, blocks)
    parts = HALVES if bits == 6 else 1
    span = blocks * parts // halves.shape[1]
    minimum_span = 1 if minimum_halves.size == 0 else blocks // minimum_halves.shape[1]
    for group in prange(words.shape[0]):
        w = words.ctypes.data + group * blocks * bits * LINE
        h = halves.ctypes.data + group * halves.shape[1] * TILE_LANES * 2
        s = 0 if steps.size == 0 else steps.ctypes.data + group * blocks * parts * TILE_LANES
        mh, ms = 0, 0
        if minimum_halves.size > 0:
            mh = minimum_halves.ctypes.data + group * minimum_halves.shape[1] * TILE_LANES * 2
        if minimum_steps.size > 0:
            ms = minimum_steps.ctypes.data + group * blocks * TILE_LANES
        num_totals = min(rows, _ROWS_TOGETHER)
        # Aligned, so that no vector lies in two cache lines.
        memory = np.empty((num_totals + _PANEL) * LINE + CACHE_LINE, np.uint8)
        t = -(-memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        if rows == 1:
            a, b, c = inputs.ctypes.data, input_scales.ctypes.data, sums.ctypes.data
            _row(bits, a, b, c, w, h, s, span, mh, ms, minimum_span, offset, blocks, t)
            _write(out, t, out.ctypes.data + group * TILE_LANES * out.itemsize)
        else:
            p, lines = t + num_totals * LINE, bits * LINE // CACHE_LINE
            q = p + _DEPTH * TURNS * LINE
            m = 0 if mh == 0 else q + _DEPTH * parts * LINE
            for begin in range(0, rows, _ROWS_TOGETHER):
                end = min(rows, begin + _ROWS_TOGETHER)
                for first in range(0, blocks, _DEPTH):
                    count = min(_DEPTH, blocks - first)
                    _unpack(bits, w, h, s, span, mh, ms, minimum_span, first, count, p, q, m)
                    following = w + (first + count) * bits * LINE if first + count < blocks else 0
                    for row in range(begin, end, ROWS):
                        together, place = min(ROWS, end - row), row * blocks + first
                        a, b = inputs.ctypes.data + place * BLOCK, input_scales.ctypes.data + place * 4
                        c, d = sums.ctypes.data + place * HALVES * 4, t + (row - begin) * LINE
                        _tile(parts, together, a, b, c, blocks, p, q, m, offset, following, lines, first, count, d)
                        following = 0
                for row in range(begin, end):
                    place = out.ctypes.data + (row * out.shape[1] + group * TILE_LANES) * out.itemsize
                    _write(out, t + (row - begin) * LINE, place)
        memory[0] = 0  # so that it is not freed before


compile_for_bfloat16(multiply)
