"""The arithmetic of chunk attention in LLVM vectors, in which each query has a lane.

The decode kernel adds the products of a key in `WIDTH` lanes and then the lanes (`decode_tile`). To get the same bits,
`scores` computes these lanes one after the other.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

from fastgen.kernels.cpu.attention.decode_tile import QUARTER, SUMMED_LANES
from fastgen.kernels.cpu.jit import lowering
from fastgen.kernels.cpu.llvm_vectors import F32, I64, Emitter, emitted
from fastgen.kernels.cpu.matmul.tile import ROWS
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS, VECTORS, WIDTH

_UNROLLED = 64 // WIDTH  # products of a lane per iteration: head sizes are often multiples of 64
STRIDE = TILE_COLUMNS * 4  # bytes from one row of scratch to the next


def _emit_scores(builder: Any, keys: Any, key_row: Any, queries: Any, depth: Any, scores: Any) -> None:
    """Compute scores [ROWS, lanes] = keys [ROWS, depth] · queries [depth, lanes], in the order of `decode_tile.scores`.

    `key_row` is the number of bytes from one key to the next.
    """
    emit = Emitter(builder, WIDTH)
    rows = [emit.offset(keys, I64(key), key_row) for key in range(ROWS)]
    steps = builder.udiv(depth, I64(WIDTH))

    def add_column(column: Any, sums: list[list[Any]]) -> None:
        line = emit.offset(queries, column, STRIDE)
        vectors = [emit.load(emit.offset(line, I64(vector), WIDTH * 4)) for vector in range(VECTORS)]
        for row, places in zip(rows, sums, strict=True):
            factor = emit.spread(emit.load(emit.offset(row, column, 4), F32))
            for vector, place in zip(vectors, places, strict=True):
                emit.add_product(place, factor, vector)

    def lane(number: int) -> list[list[Any]]:
        """Return the sum of a lane of the decode kernel, for each key."""
        sums = [emit.places(VECTORS) for _ in range(ROWS)]
        with lowering.for_range(builder, builder.udiv(steps, I64(_UNROLLED))) as step:
            for further in range(_UNROLLED):
                first = builder.mul(step.index, I64(WIDTH * _UNROLLED))
                add_column(builder.add(first, I64(number + further * WIDTH)), sums)
        unrolled = builder.sub(steps, builder.urem(steps, I64(_UNROLLED)))
        with lowering.for_range(builder, steps, start=unrolled) as step:
            add_column(builder.add(builder.mul(step.index, I64(WIDTH)), I64(number)), sums)
        return [[builder.load(place) for place in places] for places in sums]

    def quarter(first: int) -> list[list[Any]]:
        even = _added(emit, lane(first), lane(first + 2))
        return _added(emit, even, _added(emit, lane(first + 1), lane(first + 3)))

    totals = reduce(partial(_added, emit), map(quarter, range(0, WIDTH, QUARTER)))
    sums = [[lowering.alloca_once_value(builder, total) for total in row] for row in totals]
    with lowering.for_range(builder, depth, start=builder.mul(steps, I64(WIDTH))) as step:
        add_column(step.index, sums)
    for key, places in enumerate(sums):
        for vector, place in enumerate(places):
            emit.store(builder.load(place), builder.add(scores, I64(key * STRIDE + vector * WIDTH * 4)))


def _added(emit: Emitter, a: list[list[Any]], b: list[list[Any]]) -> list[list[Any]]:
    return [[emit.add(*pair) for pair in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def _emit_highest(builder: Any, scores: Any, num_keys: Any, highest: Any) -> None:
    """Set highest [lanes] to the maximum of itself and scores [num_keys, lanes]."""
    emit = Emitter(builder, WIDTH)
    places = [emit.offset(highest, I64(vector), WIDTH * 4) for vector in range(VECTORS)]
    tops = [lowering.alloca_once_value(builder, emit.load(place)) for place in places]
    with lowering.for_range(builder, num_keys) as key:
        line = emit.offset(scores, key.index, STRIDE)
        for vector, top in enumerate(tops):
            score = emit.load(emit.offset(line, I64(vector), WIDTH * 4))
            builder.store(emit.larger(score, builder.load(top)), top)
    for place, top in zip(places, tops, strict=True):
        emit.store(builder.load(top), place)


def _emit_powers(builder: Any, scores: Any, num_keys: Any, highest: Any) -> None:
    """Set scores [num_keys, lanes] = exp(scores - highest [lanes])."""
    emit = Emitter(builder, WIDTH)
    tops = [emit.load(emit.offset(highest, I64(vector), WIDTH * 4)) for vector in range(VECTORS)]
    with lowering.for_range(builder, num_keys) as key:
        line = emit.offset(scores, key.index, STRIDE)
        for vector, top in enumerate(tops):
            place = emit.offset(line, I64(vector), WIDTH * 4)
            emit.store(emit.exp(emit.subtract(emit.load(place), top)), place)


def _emit_total(builder: Any, scores: Any, num_keys: Any, total: Any) -> None:
    """Add the sum of scores [num_keys, lanes] to total [lanes]; `num_keys` is a multiple of `SUMMED_LANES`."""
    emit = Emitter(builder, WIDTH)
    for vector in range(VECTORS):
        offset = I64(vector * WIDTH * 4)
        places = emit.places(SUMMED_LANES)
        with lowering.for_range(builder, builder.udiv(num_keys, I64(SUMMED_LANES))) as step:
            first = builder.add(emit.offset(scores, step.index, SUMMED_LANES * STRIDE), offset)
            for key, place in enumerate(places):
                score = emit.load(builder.add(first, I64(key * STRIDE)))
                builder.store(emit.add(builder.load(place), score), place)
        sums = [builder.load(place) for place in places]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [emit.add(*pair) for pair in zip(sums[:half], sums[half:], strict=True)]
        place = builder.add(total, offset)
        emit.store(emit.add(emit.load(place), sums[0]), place)


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
        line = emit.offset(sums, row.index, STRIDE)
        for offset, correction in zip(offsets, corrections, strict=True):
            place = builder.add(line, offset)
            emit.store(emit.multiply(emit.load(place), correction), place)


def _emit_fold(
    builder: Any, highest: Any, total: Any, sums: Any, depth: Any, all_highest: Any, all_total: Any, all_sums: Any
) -> None:
    """Merge the softmax over one part of the context into that over all earlier parts, as `decode._merge_parts` does.

    highest and total are [lanes], sums [depth, lanes].
    """
    emit = Emitter(builder, WIDTH)
    offsets = [I64(vector * WIDTH * 4) for vector in range(VECTORS)]
    factors = []
    for offset in offsets:
        own, merged = emit.load(builder.add(highest, offset)), emit.load(builder.add(all_highest, offset))
        top = emit.larger(own, merged)
        factors.append([emit.exp(emit.subtract(each, top)) for each in (own, merged)])
        emit.store(top, builder.add(all_highest, offset))
    with lowering.for_range(builder, builder.add(depth, I64(1))) as row:
        is_total = builder.icmp_signed("==", row.index, depth)
        part = builder.select(is_total, total, emit.offset(sums, row.index, STRIDE))
        target = builder.select(is_total, all_total, emit.offset(all_sums, row.index, STRIDE))
        for offset, (own, merged) in zip(offsets, factors, strict=True):
            place = builder.add(target, offset)
            kept = emit.multiply(emit.load(place), merged)
            emit.store(emit.fused(emit.load(builder.add(part, offset)), own, kept), place)


def _emit_widen(builder: Any, element: Any, source: Any, count: Any, target: Any) -> None:
    """Set target [count] to source [count], elements, in float32; `count` is a multiple of WIDTH."""
    emit = Emitter(builder, WIDTH)
    with lowering.for_range(builder, builder.udiv(count, I64(WIDTH))) as step:
        place = emit.offset(source, step.index, WIDTH * element.bitwidth // 8)
        emit.store(emit.load_elements(place, element), emit.offset(target, step.index, WIDTH * 4))


scores, add_total, fold = emitted(_emit_scores), emitted(_emit_total), emitted(_emit_fold)
raise_highest, exponentiate = emitted(_emit_highest), emitted(_emit_powers)
rescale, widen = emitted(_emit_rescale), emitted(_emit_widen)
