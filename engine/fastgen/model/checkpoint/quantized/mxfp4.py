"""Stacked experts in MXFP4, as gpt-oss has them: float4 e2m1 with an exponent for each 32 columns.

`NAME_blocks` [experts, rows, groups, 16] has two values in a byte, the lower bits first, and `NAME_scales` [experts,
rows, groups] exponents plus 127. The values are halves of integers up to 12. Sources: OCP Microscaling Formats 1.0,
section 5.3; `convert_moe_packed_tensors` in transformers 5.23, integrations/mxfp4.py.
"""

from __future__ import annotations

from copy import copy

import torch

from fastgen.model.checkpoint.quantized.matrices import four_bit_values
from fastgen.model.checkpoint.quantized.weight import QuantizedIntegers
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import MXFP4

_GROUP = 32
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_NOT_A_NUMBER = 255


class MXFP4Weight(QuantizedIntegers):
    """The matrices of all experts."""

    bits = 5

    def __init__(self, files: TensorFiles, module: str, _described: MXFP4) -> None:
        super().__init__(files, module, ("blocks", "scales"))
        experts, rows, groups, _ = files.expect(self._name("blocks"), ["U8"], (None, None, None, _GROUP // 2))
        files.expect(self._name("scales"), ["U8"], (experts, rows, groups))
        self.shape = (experts, rows, groups * _GROUP)
        self._chosen = slice(None)

    def every(self, step: int, first: int) -> MXFP4Weight:
        """Return every `step`-th row of each expert, from row `first` on."""
        found, (experts, rows, columns) = copy(self), self.shape
        found._chosen, found.shape = slice(first, None, step), (experts, rows // step, columns)
        return found

    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read twice the values of rows."""
        return _DOUBLED[four_bit_values(self._rows("blocks", first, count)).flatten(1).long()]

    def scales(self, first: int, count: int) -> tuple[torch.Tensor, None]:
        """Read half the scales of rows."""
        exponents = self._rows("scales", first, count)
        if (exponents == _NOT_A_NUMBER).any():
            raise self._error("scales", "has a scale that is not a number")
        return torch.exp2(exponents.float() - 128), None

    def _rows(self, part: str, first: int, count: int) -> torch.Tensor:
        """Read rows: those of whole experts, of which the wanted ones are kept."""
        rows = self.shape[1]
        start, stop = first // rows, -(-(first + count) // rows)
        read = self._files.read(self._name(part), slice(start, stop))[:, self._chosen].flatten(0, 1)
        return read[first - start * rows :][:count]

    def _name(self, part: str) -> str:
        return f"{self._module}_{part}"
