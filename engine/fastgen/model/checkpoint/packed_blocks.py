"""Matrices with values of four to six bits, and scales for blocks of a row. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.model.checkpoint.gguf_types import (
    BLOCK,
    TensorType,
    five_bits,
    four_bits,
    k_five_bits,
    k_four_bits,
    k_six_bits,
    scales_and_minimums,
)

# ggml's types that have the form of `PackedBlocks`.
PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

Bytes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Factors:
    """A factor for each block of a row: the product of two numbers, which is exact in float32.

    Attributes:
        halves: float16 [rows, n], one for several neighbouring blocks.
        steps: int8 [rows, blocks], or None if all are 1.
    """

    halves: Halves
    steps: Steps | None = None

    @classmethod
    def stacked(cls, parts: Sequence[Factors]) -> Factors:
        """Concatenate the rows of factors of the same form."""
        steps = [part.steps for part in parts if part.steps is not None]
        return cls(np.concatenate([part.halves for part in parts]), np.concatenate(steps) if steps else None)

    def values(self, blocks: int) -> npt.NDArray[np.float32]:
        """Return the factors [rows, blocks] in float32."""
        wide = np.repeat(self.halves.astype(np.float32), blocks // self.halves.shape[1], axis=1)
        return wide if self.steps is None else wide * self.steps


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A matrix [rows, columns] of scale * (value - offset) - minimum.

    It is the form of ggml's types Q4_0 to Q6_K, and of GPTQ's and AWQ's groups: there, `halves` are the scales of
    groups, also those of minimums, whose steps are the zero points.

    Attributes:
        bits: of a value: 4, 5 or 6.
        values: uint8 [rows, columns], unsigned; columns is a multiple of `BLOCK`.
        offset: subtracted from each value.
        scales: for each 32 values; for each 16 if values have six bits.
        minimums: for each 32 values, or None if all are 0.
    """

    bits: int
    values: Bytes
    offset: int
    scales: Factors
    minimums: Factors | None = None

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        assert self.bits in (4, 5, 6)
        assert columns % BLOCK == 0
        for factors, count in ((self.scales, columns // self.scaled), (self.minimums, columns // BLOCK)):
            if factors is not None:
                assert len(factors.halves) == rows
                assert count % factors.halves.shape[1] == 0
                assert factors.steps is None or factors.steps.shape == (rows, count)

    @property
    def scaled(self) -> int:
        """Number of values that share a scale."""
        return BLOCK // 2 if self.bits == 6 else BLOCK

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minimums are finite, as in every sound file."""
        factors = [self.scales] if self.minimums is None else [self.scales, self.minimums]
        return all(bool(np.isfinite(each.halves).all()) for each in factors)

    @property
    def form(self) -> tuple[object, ...]:
        """What matrices that can be stacked have in common."""
        factors = (self.scales, self.minimums)
        counts = [None if each is None else (each.halves.shape[1], each.steps is None) for each in factors]
        return self.bits, self.offset, self.values.shape[1], *counts

    @classmethod
    def of_tensor(cls, raw: Bytes, kind: TensorType, columns: int) -> PackedBlocks | None:
        """Convert rows of a GGUF tensor exactly; return None for types of another form.

        Args:
            raw: bytes of whole rows.
            kind: the tensor's type.
            columns: values per row.
        """
        blocks = raw.view(kind.layout)
        rows = raw.size // kind.block_bytes * kind.block // columns

        def per_row(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.ascontiguousarray(values).reshape(rows, -1)

        def made(bits: int, values: Bytes, offset: int, scales: Factors, minimums: Factors | None) -> PackedBlocks:
            return cls(bits, values.reshape(rows, columns), offset, scales, minimums)

        match kind.name:
            case "Q4_0" | "Q5_0":
                values, bits = (four_bits(blocks), 4) if kind.name == "Q4_0" else (five_bits(blocks), 5)
                return made(bits, values, 1 << bits - 1, Factors(per_row(blocks["scale"])), None)
            case "Q4_1" | "Q5_1":
                values, bits = (four_bits(blocks), 4) if kind.name == "Q4_1" else (five_bits(blocks), 5)
                return made(bits, values, 0, Factors(per_row(blocks["scale"])), Factors(per_row(-blocks["minimum"])))
            case "Q4_K" | "Q5_K":
                values, bits = (k_four_bits(blocks), 4) if kind.name == "Q4_K" else (k_five_bits(blocks), 5)
                steps = [per_row(part.view(np.int8)) for part in scales_and_minimums(blocks["scales"])]
                halves = [per_row(blocks[name]) for name in ("scale", "minimum")]
                return made(bits, values, 0, Factors(halves[0], steps[0]), Factors(halves[1], steps[1]))
            case "Q6_K":
                scales = Factors(per_row(blocks["scale"]), per_row(blocks["scales"]))
                return made(6, k_six_bits(blocks), 32, scales, None)
        return None

    @classmethod
    def stacked(cls, parts: Sequence[PackedBlocks]) -> PackedBlocks:
        """Concatenate the rows of matrices of the same form."""
        first = parts[0]
        if len(parts) == 1:
            return first
        values, scales = np.concatenate([part.values for part in parts]), Factors.stacked([p.scales for p in parts])
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return cls(first.bits, values, first.offset, scales, Factors.stacked(minimums) if minimums else None)

    def rows(self, chosen: npt.NDArray[np.integer]) -> PackedBlocks:
        """Return the matrix of chosen rows."""

        def of(factors: Factors) -> Factors:
            return Factors(factors.halves[chosen], None if factors.steps is None else factors.steps[chosen])

        minimums = None if self.minimums is None else of(self.minimums)
        return PackedBlocks(self.bits, self.values[chosen], self.offset, of(self.scales), minimums)

    def scales_and_offsets(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return both in float32 [rows, blocks]: value times scale plus offset. Values have four or five bits."""
        num_blocks = self.values.shape[1] // self.scaled
        scales = self.scales.values(num_blocks)
        offsets = scales * np.float32(-self.offset)
        return scales, offsets if self.minimums is None else offsets - self.minimums.values(num_blocks)

    def dequantised(self) -> npt.NDArray[np.float32]:
        """Return the exact matrix in float32."""
        rows, columns = self.values.shape
        values = self.values.reshape(rows, -1, self.scaled).astype(np.float32) - np.float32(self.offset)
        matrix = (values * self.scales.values(columns // self.scaled)[:, :, None]).reshape(rows, -1, BLOCK)
        if self.minimums is not None:
            matrix -= self.minimums.values(columns // BLOCK)[:, :, None]
        return matrix.reshape(rows, columns)
