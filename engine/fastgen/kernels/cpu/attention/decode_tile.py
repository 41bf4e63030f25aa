"""Two products of decode attention in LLVM vectors: scores of a run of keys, and the weighted sum of their values.

Query heads that share a key-value head share each load of a key or value; up to `HEADS` of them keep their sums in
registers. Both products prefetch what the kernel reads next while they compute: processors do not predict the reads of
a paged cache, whose runs are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.jit import lowering
from fastgen.kernels.cpu.llvm_vectors import F32, I32, I64, Emitter, emitted, emitted_by_count
from fastgen.kernels.cpu.vector_width import CACHE_LINE, WIDTH

KEYS = 4  # whose scores are computed together
HEADS = 4 if WIDTH == 16 else 2  # of AVX2's sixteen registers, KEYS * 2 hold sums
QUARTER = 4  # lanes that are added first when the lanes of a score are added
SUMMED_LANES = 16  # of the sum of a tile's exponentials
_VECTORS = 4  # of a value, whose sums are computed together


def _emit_scores(
    heads: int, builder: Any, element: Any,
    queries: Any, query_row: Any, keys: Any, key_row: Any, depth: Any, num_keys: Any, out: Any, out_row: Any,
    ahead: Any,
) -> None:  # fmt: skip
    """Compute out [heads, num_keys] = queries [heads, depth] · keys [num_keys, depth].

    Args:
        heads: at most `HEADS`.
        builder, element: LLVM's builder, and the type of the keys' elements.
        queries, query_row: address, and bytes from one to the next; likewise keys and out.
        depth: a multiple of `WIDTH`.
        num_keys: a multiple of `KEYS`.
        ahead: address of the memory to prefetch, as long as the keys.
    """
    emit = Emitter(builder, WIDTH)
    size = element.bitwidth // 8
    run = builder.mul(key_row, I64(KEYS))
    lines = builder.udiv(builder.add(run, I64(CACHE_LINE - 1)), I64(CACHE_LINE))
    with lowering.for_range(builder, builder.udiv(num_keys, I64(KEYS))) as step:
        first = emit.offset(keys, step.index, run)
        next_read = emit.offset(ahead, step.index, run)
        with lowering.for_range(builder, lines) as line:
            emit.prefetch(emit.offset(next_read, line.index, CACHE_LINE))
        sums = [emit.places(KEYS) for _ in range(heads)]
        with lowering.for_range(builder, builder.udiv(depth, I64(WIDTH))) as column:
            at = emit.offset(first, column.index, WIDTH * size)
            vectors = [emit.load_elements(emit.offset(at, I64(key), key_row), element) for key in range(KEYS)]
            query = emit.offset(queries, column.index, WIDTH * 4)
            for head, places in enumerate(sums):
                factor = emit.load(emit.offset(query, I64(head), query_row))
                for vector, place in zip(vectors, places, strict=True):
                    emit.add_product(place, factor, vector)
        for head, places in enumerate(sums):
            result = emit.offset(emit.offset(out, I64(head), out_row), step.index, KEYS * 4)
            emit.store(_sum_lanes(emit, [builder.load(place) for place in places]), result)


def _emit_sums(
    heads: int, builder: Any, element: Any,
    weights: Any, weight_row: Any, values: Any, value_row: Any, depth: Any, num_keys: Any, out: Any, out_row: Any,
    ahead: Any,
) -> None:  # fmt: skip
    """Compute out [heads, depth] += weights [heads, num_keys] · values [num_keys, depth], in the order of keys.

    Arguments as those of `_emit_scores`; `num_keys` is any number.
    """
    emit = Emitter(builder, WIDTH)
    size = element.bitwidth // 8

    def add_columns(column: Any, vectors: int) -> None:
        """Compute `vectors` adjacent vectors of each head's output, from vector `column` on, over all keys."""
        offset = builder.mul(column, I64(WIDTH * size))
        first, next_read = builder.add(values, offset), builder.add(ahead, offset)
        results = [
            [
                emit.offset(emit.offset(out, I64(head), out_row), builder.add(column, I64(vector)), WIDTH * 4)
                for vector in range(vectors)
            ]
            for head in range(heads)
        ]
        totals = [[lowering.alloca_once_value(builder, emit.load(place)) for place in row] for row in results]
        with lowering.for_range(builder, num_keys) as key:
            line = emit.offset(first, key.index, value_row)
            following = emit.offset(next_read, key.index, value_row)
            for start in range(0, vectors * WIDTH * size, CACHE_LINE):
                emit.prefetch(builder.add(following, I64(start)))
            loaded = [
                emit.load_elements(emit.offset(line, I64(vector), WIDTH * size), element) for vector in range(vectors)
            ]
            for head, row in enumerate(totals):
                weight = emit.offset(emit.offset(weights, I64(head), weight_row), key.index, 4)
                factor = emit.spread(emit.load(weight, F32))
                for vector, place in zip(loaded, row, strict=True):
                    emit.add_product(place, factor, vector)
        for row, places in zip(totals, results, strict=True):
            for total, place in zip(row, places, strict=True):
                emit.store(builder.load(total), place)

    columns = builder.udiv(depth, I64(WIDTH))
    steps = builder.udiv(columns, I64(_VECTORS))
    with lowering.for_range(builder, steps) as step:
        add_columns(builder.mul(step.index, I64(_VECTORS)), _VECTORS)
    with lowering.for_range(builder, columns, start=builder.mul(steps, I64(_VECTORS))) as step:
        add_columns(step.index, 1)


def _sum_lanes(emit: Emitter, vectors: Sequence[Any]) -> Any:
    """Return a vector of KEYS floats: the sum of the lanes of each of KEYS vectors."""
    builder = emit.builder

    def shuffle(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def interleaved(a: Any, b: Any, unit: int) -> Any:
        """Add the two halves of each four lanes of a, and of b, and interleave the sums by `unit` lanes."""
        quarters = range(0, WIDTH, QUARTER)
        halves = (
            [
                quarter + half + lane + other * WIDTH
                for quarter in quarters
                for position in range(0, KEYS // 2, unit)
                for other in (0, 1)
                for lane in range(position, position + unit)
            ]
            for half in (0, KEYS // 2)
        )
        return emit.add(*(shuffle(a, b, lanes) for lanes in halves))

    a, b, c, d = vectors
    quarters = interleaved(interleaved(a, b, 1), interleaved(c, d, 1), 2)
    parts = [shuffle(quarters, quarters, list(range(start, start + KEYS))) for start in range(0, WIDTH, KEYS)]
    return reduce(emit.add, parts)


def _emit_rest(
    builder: Any, element: Any, query: Any, keys: Any, key_row: Any, depth: Any, num_keys: Any, out: Any
) -> None:
    """Add query [depth] · keys [num_keys, depth] to out [num_keys], one product after the other."""
    emit = Emitter(builder, 1)
    with lowering.for_range(builder, num_keys) as key:
        result = emit.offset(out, key.index, 4)
        place = lowering.alloca_once_value(builder, emit.load(result))
        line = emit.offset(keys, key.index, key_row)
        with lowering.for_range(builder, depth) as step:
            factor = emit.load_elements(emit.offset(line, step.index, element.bitwidth // 8), element)
            emit.add_product(place, factor, emit.load(emit.offset(query, step.index, 4)))
        emit.store(builder.load(place), result)


scores = emitted_by_count(_emit_scores)
add_rest = emitted(_emit_rest)
weighted_sums = emitted_by_count(_emit_sums)
