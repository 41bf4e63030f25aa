"""Int8 matrices with one scale per 32 values of a row. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastgen.model.checkpoint.gguf_types import BLOCK, TensorType, dequantise, five_bits, four_bits

_ROWS_AT_A_TIME = 64  # keeps the temporaries of a conversion in the processor's cache


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """A matrix [rows, columns] as values times the scale of each block of `BLOCK` columns.

    Attributes:
        values: int8 [rows, columns].
        scales: float32 [rows, columns / BLOCK rounded up].
    """

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        assert self.scales.shape == (rows, -(-columns // BLOCK))

    @classmethod
    def quantise(cls, matrix: npt.NDArray[np.float32]) -> Int8Blocks:
        """Quantise a matrix [rows, columns]: the largest absolute value of a block becomes ± 127, as in Q8_0.

        Unlike Q8_0, scales are float32.
        """
        rows, columns = matrix.shape
        padded = -(-columns // BLOCK) * BLOCK
        values, scales = np.empty((rows, columns), np.int8), np.empty((rows, padded // BLOCK), np.float32)
        part = np.zeros((min(rows, _ROWS_AT_A_TIME), padded), np.float32)
        for start in range(0, rows, _ROWS_AT_A_TIME):
            chosen = slice(start, min(rows, start + _ROWS_AT_A_TIME))
            taken = part[: chosen.stop - start]
            taken[:, :columns] = matrix[chosen]
            largest = _largest_of_blocks(np.abs(taken)).reshape(len(taken), -1)
            scales[chosen] = largest / np.float32(127)
            inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
            scaled = (taken.reshape(len(taken), -1, BLOCK) * inverse[:, :, None]).reshape(len(taken), padded)
            values[chosen] = np.rint(scaled, out=scaled)[:, :columns]
        return cls(values, scales)

    @classmethod
    def of_tensor(cls, raw: npt.NDArray[np.uint8], kind: TensorType, columns: int) -> Int8Blocks:
        """Convert rows of a GGUF tensor: exactly for Q8_0, Q5_0 and Q4_0, otherwise by quantising.

        Args:
            raw: bytes of whole rows.
            kind: the tensor's type.
            columns: values per row.
        """
        blocks = raw.view(kind.layout)
        match kind.name:
            case "Q8_0":
                values = np.ascontiguousarray(blocks["values"])
            case "Q5_0":
                values = five_bits(blocks).view(np.int8) - np.int8(16)
            case "Q4_0":
                values = four_bits(blocks).view(np.int8) - np.int8(8)
            case _:
                return cls.quantise(dequantise(raw, kind).reshape(-1, columns))
        scales = blocks["scale"].astype(np.float32)
        return cls(values.reshape(-1, columns), scales.reshape(-1, columns // BLOCK))

    @classmethod
    def stacked(cls, parts: Sequence[Int8Blocks]) -> Int8Blocks:
        """Concatenate the rows of matrices of equal width."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.scales for part in parts]))

    def rows(self, chosen: npt.NDArray[np.integer]) -> Int8Blocks:
        """Return the matrix of chosen rows."""
        return Int8Blocks(self.values[chosen], self.scales[chosen])

    def dequantised(self) -> npt.NDArray[np.float32]:
        """Return the exact matrix in float32."""
        columns = self.values.shape[1]
        return self.values * np.repeat(self.scales, BLOCK, axis=1)[:, :columns]


def _largest_of_blocks(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the largest of each `BLOCK` consecutive values, none of which is negative, as [number of blocks].

    The bits of such floats are in the floats' order. Maxima of integers in pairs are three times as fast as a maximum
    of floats along an axis of 32.
    """
    largest = values.reshape(-1).view(np.int32)
    for _ in range(BLOCK.bit_length() - 1):
        largest = np.maximum(largest[::2], largest[1::2])
    return largest.view(np.float32)
