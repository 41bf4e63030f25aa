"""Integers of compressed-tensors: `weight_packed` with 4 or 8 bits in words, or `weight` in bytes.

Packed integers and zero points have half of their range added. Integers are packed along rows, zero points along
columns. Source: compressed-tensors 0.20, compressors/pack_quantized and compressors/naive_quantized.
"""

from __future__ import annotations

import torch

from fastgen.model.checkpoint.quantized.matrices import neighbouring, unpacked_integers
from fastgen.model.checkpoint.quantized.weight import FLOATS, QuantizedIntegers
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import Integers

_PARTS = ("weight_scale", "weight_zero_point", "weight_g_idx")
_UNREAD = ("input_scale", "input_zero_point")  # static quantisation of activations


class IntegerWeight(QuantizedIntegers):
    """A matrix of integers, one in a byte."""

    _values = "weight"

    def __init__(self, files: TensorFiles, module: str, described: Integers) -> None:
        super().__init__(files, module, (self._values, "weight_shape", *_PARTS), _UNREAD)
        self.bits = described.bits if self._values == "weight_packed" else 8
        rows, columns = self.shape = self._stored_shape()
        groups = 1 if described.group_size is None else -(-columns // described.group_size)
        scale = self._name("weight_scale")
        self._is_one_scale = scale in files and files.shape(scale) == (1,)
        files.expect(scale, FLOATS, (1,) if self._is_one_scale else (rows, groups))
        self._groups = 1 if self._is_one_scale else groups
        self._has_zeros = not described.symmetric
        if self._has_zeros:
            self._check_zeros()
        self._has_order = self._name("weight_g_idx") in files
        if self._has_order:
            files.expect(self._name("weight_g_idx"), ["I32", "I64"], (columns,))
        elif columns % self._groups:
            raise self._error("weight_scale", f"has {self._groups} groups, which do not divide {columns} columns")

    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read the integers of rows."""
        return self._files.read(self._name("weight"), slice(first, first + count))

    def scales(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the scales and the zero points of rows."""
        scales = self._files.read(self._name("weight_scale")).float().reshape(-1, self._groups)
        scales = scales.expand(count, 1) if self._is_one_scale else scales[first : first + count]
        zeros = self._zeros(first, count)
        return scales.contiguous(), None if zeros is None else zeros.expand(count, self._groups)

    def group_of(self) -> torch.Tensor | None:
        """Read the group of each column."""
        if not self._has_order:
            return None
        group_of = self._files.read(self._name("weight_g_idx")).long()
        if group_of.min() < 0:  # not used
            group_of = torch.arange(self._groups).repeat_interleave(-(-self.shape[1] // self._groups))[: self.shape[1]]
        if group_of.max() >= self._groups:
            raise self._error("weight_g_idx", f"names group {group_of.max()} of {self._groups}")
        return None if neighbouring(group_of, self._groups) else group_of

    def _stored_shape(self) -> tuple[int, ...]:
        return self._files.expect(self._name("weight"), ["I8"], (None, None))

    def _check_zeros(self) -> None:
        zeros = (1,) if self._is_one_scale else (self.shape[0], self._groups)
        self._files.expect(self._name("weight_zero_point"), ["I8"], zeros)

    def _zeros(self, first: int, count: int) -> torch.Tensor | None:
        if not self._has_zeros:
            return None
        zeros = self._files.read(self._name("weight_zero_point")).to(torch.int16)
        return zeros if self._is_one_scale else zeros[first : first + count]


class PackedWeight(IntegerWeight):
    """A matrix of integers, packed into words."""

    _values = "weight_packed"

    def _stored_shape(self) -> tuple[int, ...]:
        self._files.expect(self._name("weight_shape"), ["I64", "I32"], (2,))
        rows, columns = (int(size) for size in self._files.read(self._name("weight_shape")))
        words = -(-columns * self.bits // 32)
        self._files.expect(self._name("weight_packed"), ["I32"], (rows, words))
        return rows, columns

    def _check_zeros(self) -> None:
        words = -(-self.shape[0] * self.bits // 32)
        self._files.expect(self._name("weight_zero_point"), ["I32"], (words, self._groups))

    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read the integers of rows."""
        words = self._files.read(self._name("weight_packed"), slice(first, first + count))
        return unpacked_integers(words, self.bits)[:, : self.shape[1]]

    def _zeros(self, first: int, count: int) -> torch.Tensor | None:
        if not self._has_zeros:
            return torch.full((count, 1), 8, dtype=torch.int16) if self.bits == 4 else None
        words = self._files.read(self._name("weight_zero_point"))
        return unpacked_integers(words.t(), self.bits)[:, first : first + count].t().to(torch.int16).contiguous()
