"""Products of four unsigned bytes of weights with four signed bytes of inputs, in each lane of a vector.

With AVX512-VNNI by vpdpbusd, with AVX512-BW or AVX2 by vpmaddubsw and vpmaddwd, whose sums of two products of six bits
do not overflow 16 bits; elsewhere by products of 32 bits. All give the same integers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.llvm_vectors import I16, I32, all_lanes, call_intrinsic
from fastgen.kernels.cpu.matmul.int8_layout import BYTES
from fastgen.kernels.cpu.vector_width import has_byte_products, has_vnni

WORD_LANES = 16  # of 32 bits, in the vectors of weights, inputs and sums
WORD_VECTOR = ir.VectorType(I32, WORD_LANES)

# vpmaddubsw and vpmaddwd, by the number of lanes.
_INSTRUCTIONS = {
    8: ("x86.avx2.pmadd.ub.sw", "x86.avx2.pmadd.wd"),
    16: ("x86.avx512.pmaddubs.w.512", "x86.avx512.pmaddw.d.512"),
}


def everywhere(value: int) -> Any:
    """Return the vector with the same integer in all lanes."""
    return all_lanes(WORD_VECTOR, value)


def add_byte_products(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """Return `total` plus the products of each lane's bytes. Weights have at most six bits."""
    if has_vnni():
        return call_intrinsic(builder, "x86.avx512.vpdpbusd.512", WORD_VECTOR, total, weights, inputs)
    if has_byte_products(512):
        return builder.add(total, _sum_of_pairs(builder, weights, inputs, WORD_LANES))
    if has_byte_products(256):
        parts = []
        for first in (0, WORD_LANES // 2):
            lanes = ir.Constant(ir.VectorType(I32, WORD_LANES // 2), list(range(first, first + WORD_LANES // 2)))
            some_weights, some_inputs = (builder.shuffle_vector(each, each, lanes) for each in (weights, inputs))
            parts.append(_sum_of_pairs(builder, some_weights, some_inputs, WORD_LANES // 2))
        return builder.add(total, builder.shuffle_vector(*parts, ir.Constant(WORD_VECTOR, list(range(WORD_LANES)))))
    for byte in range(BYTES):
        unsigned = builder.and_(builder.lshr(weights, everywhere(8 * byte)), everywhere(255))
        signed = builder.ashr(builder.shl(inputs, everywhere(24 - 8 * byte)), everywhere(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


def _sum_of_pairs(builder: Any, weights: Any, inputs: Any, lanes: int) -> Any:
    """Return the sums of four products of bytes in `lanes` lanes."""
    kind = ir.VectorType(ir.IntType(8), lanes * BYTES)
    unsigned, signed = (builder.bitcast(each, kind) for each in (weights, inputs))
    halves = ir.VectorType(I16, lanes * 2)
    of_bytes, of_pairs = _INSTRUCTIONS[lanes]
    pairs = call_intrinsic(builder, of_bytes, halves, unsigned, signed)
    return call_intrinsic(builder, of_pairs, ir.VectorType(I32, lanes), pairs, all_lanes(halves, 1))
