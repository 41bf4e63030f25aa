"""Code that reads a group of packed weights (`packed_layout`): bytes for products, and factors in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.jit import lowering
from fastgen.kernels.cpu.llvm_vectors import I16, I64, Emitter
from fastgen.kernels.cpu.matmul.byte_products import WORD_LANES, WORD_VECTOR, everywhere
from fastgen.kernels.cpu.matmul.int8_layout import BLOCK, BYTES, TILE_LANES
from fastgen.kernels.cpu.matmul.quantise import HALVES
from fastgen.kernels.cpu.vector_width import converts_float16

GROUP_VECTORS = TILE_LANES // WORD_LANES
TURNS = BLOCK // BYTES  # products of four bytes in a block
LINE = TILE_LANES * 4  # bytes of a word, a sum or a factor of all outputs

_HALVES, _STEPS = ir.VectorType(I16, WORD_LANES), ir.VectorType(ir.IntType(8), WORD_LANES)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """LLVM's values of the addresses of a group's arrays, 0 if one is absent; spans are numbers of scaled parts."""

    bits: int
    words: Any
    halves: Any
    steps: Any
    span: Any
    minimum_halves: Any
    minimum_steps: Any
    minimum_span: Any

    @property
    def parts(self) -> int:
        """Parts of a block that have a scale each."""
        return HALVES if self.bits == 6 else 1

    def words_of(self, emit: Emitter, block: Any) -> list[list[Any]]:
        """Load a block's words: a list for each vector of outputs."""
        line = emit.offset(self.words, block, self.bits * LINE)
        loaded = [
            emit.load(emit.offset(line, I64(number), WORD_LANES * 4), WORD_VECTOR)
            for number in range(self.bits * GROUP_VECTORS)
        ]
        return [loaded[vector::GROUP_VECTORS] for vector in range(GROUP_VECTORS)]

    def bytes_of(self, builder: Any, words: list[Any], turn: int) -> Any:
        """Return the values 4 * turn to 4 * turn + 3 of a block, one a byte."""
        lower = words[turn % 4] if turn < 4 else builder.lshr(words[turn - 4], everywhere(4))
        values = builder.and_(lower, everywhere(0x0F0F0F0F))
        if self.bits == 4:
            return values
        plane, place = (words[4], turn) if self.bits == 5 else (words[4 + turn // 4], turn % 4 * 2)
        mask = 0x10101010 if self.bits == 5 else 0x30303030
        moved = builder.shl(plane, everywhere(4 - place)) if place <= 4 else builder.lshr(plane, everywhere(place - 4))
        return builder.or_(values, builder.and_(moved, everywhere(mask)))

    def scales(self, emit: Emitter, block: Any, part: int) -> list[Any]:
        """Load the scales of a part of a block."""
        index = emit.builder.add(emit.builder.mul(block, I64(self.parts)), I64(part))
        return _factors(emit, self.halves, self.steps, self.span, index)

    def minimums(self, emit: Emitter, block: Any) -> list[Any]:
        """Load the minimums of a block."""
        return _factors(emit, self.minimum_halves, self.minimum_steps, self.minimum_span, block)


def _factors(emit: Emitter, halves: Any, steps: Any, span: Any, index: Any) -> list[Any]:
    """Load factors: one for `span` neighbours, times a step unless the steps' address is 0."""
    builder = emit.builder
    line = emit.offset(halves, builder.udiv(index, span), TILE_LANES * 2)
    loaded = [
        _widened(emit, emit.load(emit.offset(line, I64(vector), WORD_LANES * 2), _HALVES))
        for vector in range(GROUP_VECTORS)
    ]
    places = [lowering.alloca_once(builder, emit.floats) for _ in loaded]
    for place, factor in zip(places, loaded, strict=True):
        builder.store(factor, place)
    with builder.if_then(builder.icmp_unsigned("!=", steps, I64(0))):
        line = emit.offset(steps, index, TILE_LANES)
        for vector, (place, factor) in enumerate(zip(places, loaded, strict=True)):
            numbers = emit.load(emit.offset(line, I64(vector), WORD_LANES), _STEPS)
            builder.store(emit.multiply(factor, builder.sitofp(numbers, emit.floats)), place)
    return [builder.load(place) for place in places]


def _widened(emit: Emitter, halves: Any) -> Any:
    """Convert finite float16 numbers, given as bits, to float32."""
    builder = emit.builder
    if converts_float16():
        return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), WORD_LANES)), emit.floats)
    bits = builder.zext(halves, WORD_VECTOR)
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, everywhere(0x7FFF)), everywhere(13)), emit.floats)
    scaled = builder.bitcast(emit.multiply(magnitude, emit.constant(2.0**112)), WORD_VECTOR)
    sign = builder.shl(builder.and_(bits, everywhere(0x8000)), everywhere(16))
    return builder.bitcast(builder.or_(scaled, sign), emit.floats)
