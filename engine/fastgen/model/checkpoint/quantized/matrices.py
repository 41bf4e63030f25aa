"""Quantised matrices in memory, which the formats of checkpoints are read as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from fastgen.model.checkpoint.gguf_types import BLOCK
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.packed_blocks import Factors, PackedBlocks


class QuantizedMatrix(Protocol):
    """A matrix [rows, columns] of values with scales."""

    def float32(self) -> torch.Tensor:
        """Return the values in float32, in new memory."""

    def int8(self) -> Int8Blocks:
        """Return the values as int8 blocks: exact where these can hold them, otherwise quantised."""

    def take(self, rows: torch.Tensor) -> QuantizedMatrix:
        """Return some rows, given their numbers, int64."""

    def columns(self, some: range) -> QuantizedMatrix:
        """Return some neighbouring columns."""


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """Values in float8 e4m3 times the scale of their row and block of columns.

    Attributes:
        values: float8_e4m3fn [rows, columns].
        scales: float32 [rows, blocks].
        block: columns of a block; the last block may have fewer.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: int

    def float32(self) -> torch.Tensor:
        """Return the values times their scales."""
        out = self.values.float()
        for number, scales in enumerate(self.scales.split(1, 1)):  # type: ignore[no-untyped-call]
            out[:, number * self.block : (number + 1) * self.block] *= scales
        return out

    def int8(self) -> Int8Blocks:
        """Quantise: no int8 has the steps of a float8."""
        return Int8Blocks.quantise(self.float32().numpy())

    def take(self, rows: torch.Tensor) -> Float8Matrix:
        """Return some rows."""
        return Float8Matrix(self.values.index_select(0, rows), self.scales.index_select(0, rows), self.block)

    def columns(self, some: range) -> Float8Matrix:
        """Return some neighbouring columns. Blocks become smaller if the first column is in the middle of one."""
        block = math.gcd(some.start, self.block)
        scales = self.scales.index_select(1, torch.arange(some.start, some.stop, block) // self.block)
        return Float8Matrix(self.values[:, some.start : some.stop], scales, block)


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """Integers minus the zero point of their group of columns, times its scale.

    Attributes:
        values: int8 [rows, columns].
        scales: float32 [rows, groups].
        zeros: int16 [rows, groups]; None if all are 0.
        group_of: group of each column, int64 [columns]; None for neighbouring columns, the same number in each group.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    def float32(self) -> torch.Tensor:
        """Return the differences times their scales."""
        out = self.values.float()
        if self.group_of is None:
            groups = out.unflatten(1, (self.scales.shape[1], -1))  # type: ignore[no-untyped-call]
            if self.zeros is not None:
                groups -= self.zeros[:, :, None]
            groups *= self.scales[:, :, None]
            return out
        if self.zeros is not None:
            out -= self.zeros.index_select(1, self.group_of)
        return out.mul_(self.scales.index_select(1, self.group_of))

    def int8(self) -> Int8Blocks:
        """Return int8 blocks: exact if no block has two scales, and differences from the zero points fit in a byte."""
        (rows, columns), groups = self.values.shape, self.scales.shape[1]
        size = columns // groups
        if self.group_of is not None or (groups > 1 and size % BLOCK):
            return Int8Blocks.quantise(self.float32().numpy())
        values = self.values
        if self.zeros is not None:
            differences = values.unflatten(1, (groups, size)) - self.zeros[:, :, None]  # type: ignore[no-untyped-call]
            if differences.min() < -128 or differences.max() > 127:
                return Int8Blocks.quantise(self.float32().numpy())
            values = differences.to(torch.int8).view(rows, columns)
        scales = self.scales.repeat_interleave(-(-size // BLOCK), 1)
        return Int8Blocks(values.contiguous().numpy(), scales.numpy())

    def packed(self, bits: int) -> PackedBlocks | None:
        """Return the same values as blocks that stay packed, given the bits of an integer.

        None if they have another form: more than five bits, groups that are no whole blocks, or scales that float16
        does not hold.
        """
        (rows, columns), groups = self.values.shape, self.scales.shape[1]
        halves = self.scales.half()
        if bits not in (4, 5) or self.group_of is not None or columns % (groups * BLOCK):
            return None
        if not torch.equal(halves.float(), self.scales) or not halves.isfinite().all():
            return None
        scales = Factors(halves.numpy())
        if self.zeros is None:  # integers with a sign
            offset = 1 << bits - 1
            return PackedBlocks(bits, (self.values + offset).to(torch.uint8).numpy(), offset, scales)
        zeros = self.zeros.to(torch.int8).expand(rows, groups)
        steps = zeros.repeat_interleave(columns // groups // BLOCK, 1).numpy()
        return PackedBlocks(bits, self.values.to(torch.uint8).numpy(), 0, scales, Factors(halves.numpy(), steps))

    def take(self, rows: torch.Tensor) -> IntegerMatrix:
        """Return some rows."""
        zeros = None if self.zeros is None else self.zeros.index_select(0, rows)
        return IntegerMatrix(self.values.index_select(0, rows), self.scales.index_select(0, rows), zeros, self.group_of)

    def columns(self, some: range) -> IntegerMatrix:
        """Return some neighbouring columns. Groups become smaller if one is cut."""
        values = self.values[:, some.start : some.stop]
        if self.group_of is not None:
            return IntegerMatrix(values, self.scales, self.zeros, self.group_of[some.start : some.stop])
        size = self.values.shape[1] // self.scales.shape[1]
        groups = torch.arange(some.start, some.stop, math.gcd(some.start, some.stop, size)) // size
        zeros = None if self.zeros is None else self.zeros.index_select(1, groups)
        return IntegerMatrix(values, self.scales.index_select(1, groups), zeros)


def four_bit_values(words: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit integers of words [..., n] of any type, the lowest bits first: uint8 [..., 2 * bytes]."""
    packed = words.contiguous().view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpacked_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of `bits` 4 or 8 in int32 words [..., n], the lowest bits first: int8 [..., n * 32 / bits].

    Bytes become signed by subtracting 128; 4-bit integers stay from 0 to 15.
    """
    if bits == 4:
        return four_bit_values(words).view(torch.int8)
    return (words.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def neighbouring(group_of: torch.Tensor, groups: int) -> bool:
    """Return whether `groups` groups have the same number of columns each, in order."""
    columns = len(group_of)
    if columns % groups:
        return False
    return bool(torch.equal(group_of, torch.arange(groups).repeat_interleave(columns // groups)))
