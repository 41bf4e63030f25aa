"""GPTQ's layout: integers with zero points, packed along the columns of the matrix [columns, rows].

`g_idx` has the group of each column, in any order with act-order. The first version of the format stores zero points
minus 1, subtracted from whole words; so 1 is added to whole words here too. Source: GPTQModel 7,
gptqmodel/nn_modules/qlinear/__init__.py (`dequantize_weight`) and gptqmodel/utils/model.py
(`convert_gptq_v1_to_v2_format_module`).
"""

from __future__ import annotations

import torch

from fastgen.model.checkpoint.quantized.matrices import neighbouring, unpacked_integers
from fastgen.model.checkpoint.quantized.weight import FLOATS, QuantizedIntegers
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import GPTQ

_ONES = {4: 0x11111111, 8: 0x01010101}  # 1 for each integer of a word


class GPTQWeight(QuantizedIntegers):
    """A matrix in `qweight`, `qzeros`, `scales` and `g_idx`."""

    def __init__(self, files: TensorFiles, module: str, described: GPTQ) -> None:
        super().__init__(files, module, ("qweight", "qzeros", "scales", "g_idx"))
        words, rows = files.expect(self._name("qweight"), ["I32"], (None, None))
        (columns,) = files.expect(self._name("g_idx"), ["I32", "I64"], (None,))
        self.bits = described.bits or words * 32 // columns
        if self.bits not in _ONES or words * 32 != columns * self.bits:
            bits = "4 or 8" if described.bits is None else str(described.bits)
            raise self._error("qweight", f"has {words} words for the {columns} columns of g_idx: expected {bits} bits")
        groups, _ = files.expect(self._name("scales"), FLOATS, (None, rows))
        files.expect(self._name("qzeros"), ["I32"], (groups, -(-rows * self.bits // 32)))
        self._groups, self._zero_offset = groups, described.zero_offset
        self.shape = (rows, columns)

    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read the integers of rows."""
        return unpacked_integers(
            self._files.read(self._name("qweight"), slice(None), slice(first, first + count)).t(), self.bits
        )

    def scales(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the zero points of rows."""
        rows = slice(first, first + count)
        words = self._files.read(self._name("qzeros")) + self._zero_offset * _ONES[self.bits]
        zeros = unpacked_integers(words, self.bits)[:, rows].t().to(torch.int16).contiguous()
        return self._files.read(self._name("scales"), slice(None), rows).float().t().contiguous(), zeros

    def group_of(self) -> torch.Tensor | None:
        """Read the group of each column."""
        group_of = self._files.read(self._name("g_idx")).long()
        if group_of.min() < 0 or group_of.max() >= self._groups:
            found = f"names groups {group_of.min()} to {group_of.max()}"
            raise self._error("g_idx", f"{found}: expected 0 to {self._groups - 1}")
        return None if neighbouring(group_of, self._groups) else group_of
