"""A tile of a matrix product in LLVM vectors, the building block of the kernels.

Up to four rows of the left-hand matrix share three vectors of the right-hand one, which keeps up to twelve sums in
registers (Goto and van de Geijn, 2008; of AVX2's sixteen registers this leaves one for a factor).
"""

from __future__ import annotations

from typing import Any

from fastgen.kernels.cpu.jit import lowering
from fastgen.kernels.cpu.llvm_vectors import F32, I64, Emitter
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS, VECTORS, WIDTH

ROWS = 4  # per tile, at most
_UNROLLED = 4  # columns per iteration: reduces loop overhead


def emit_product(
    rows: int, builder: Any, a: Any, a_row: Any, a_column: Any, b: Any, depth: Any, c: Any, c_row: Any, adds: Any
) -> None:
    """Compute c [rows, TILE_COLUMNS] = a [rows, depth] · b [depth, TILE_COLUMNS].

    Each sum is computed in the order of the columns, regardless of the number of rows.

    Args:
        rows: at most `ROWS`.
        builder: LLVM's.
        a, a_row, a_column: address of a, and bytes between its rows and between its columns.
        b: address of b, whose rows are contiguous.
        depth: number of columns of a.
        c, c_row: address of c, and bytes between its rows.
        adds: 1 to add the product to c, otherwise 0.
    """
    emit = Emitter(builder, WIDTH)
    sums = [emit.places(VECTORS) for _ in range(rows)]
    _add_products(emit, sums, a, a_row, a_column, b, depth)
    pairs = _with_results(emit, sums, c, c_row)
    # Add the previous value of c last: a long sum is then a sum of short ones, with a smaller rounding error.
    with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
        for total, result in pairs:
            builder.store(emit.add(emit.load(result), builder.load(total)), total)
    for total, result in pairs:
        emit.store(builder.load(total), result)


def emit_continued_product(
    rows: int, builder: Any, a: Any, a_row: Any, a_column: Any, b: Any, depth: Any, c: Any, c_row: Any
) -> None:
    """Add the products of the columns of a to c one after the other; arguments as those of `emit_product`.

    So the result does not depend on how the columns are divided among calls.
    """
    emit = Emitter(builder, WIDTH)
    sums = [emit.places(VECTORS) for _ in range(rows)]
    pairs = _with_results(emit, sums, c, c_row)
    for total, result in pairs:
        builder.store(emit.load(result), total)
    _add_products(emit, sums, a, a_row, a_column, b, depth)
    for total, result in pairs:
        emit.store(builder.load(total), result)


def _with_results(emit: Emitter, sums: list[list[Any]], c: Any, c_row: Any) -> list[tuple[Any, Any]]:
    """Return the places of all sums with the addresses of their results."""
    return [
        (total, emit.offset(emit.offset(c, I64(row), c_row), I64(vector), WIDTH * 4))
        for row, totals in enumerate(sums)
        for vector, total in enumerate(totals)
    ]


def _add_products(emit: Emitter, sums: list[list[Any]], a: Any, a_row: Any, a_column: Any, b: Any, depth: Any) -> None:
    """Add the product to sums, one column of a after the other."""
    builder = emit.builder
    inputs = [emit.offset(a, I64(row), a_row) for row in range(len(sums))]

    def add_column(column: Any) -> None:
        line = emit.offset(b, column, TILE_COLUMNS * 4)
        vectors = [emit.load(emit.offset(line, I64(vector), WIDTH * 4)) for vector in range(VECTORS)]
        for first, row in zip(inputs, sums, strict=True):
            factor = emit.spread(emit.load(emit.offset(first, column, a_column), F32))
            for vector, total in zip(vectors, row, strict=True):
                emit.add_product(total, factor, vector)

    steps = builder.sdiv(depth, I64(_UNROLLED))
    with lowering.for_range(builder, steps) as step:
        begin = builder.mul(step.index, I64(_UNROLLED))
        for ahead in range(_UNROLLED):
            add_column(builder.add(begin, I64(ahead)))
    with lowering.for_range(builder, depth, start=builder.mul(steps, I64(_UNROLLED))) as step:
        add_column(step.index)
