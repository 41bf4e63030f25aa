"""AutoAWQ's GEMM layout: 4-bit integers with zero points, packed along the rows of the matrix [columns, rows].

The eight integers of a word are interleaved. Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py and
awq/utils/packing_utils.py.
"""

from __future__ import annotations

import torch

from fastgen.model.checkpoint.quantized.matrices import four_bit_values
from fastgen.model.checkpoint.quantized.weight import FLOATS, QuantizedIntegers
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import AWQ

_WORD = 8  # integers in a word
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of each row of the matrix in a word


class AWQWeight(QuantizedIntegers):
    """A matrix in `qweight`, `qzeros` and `scales`."""

    bits = 4

    def __init__(self, files: TensorFiles, module: str, described: AWQ) -> None:
        super().__init__(files, module, ("qweight", "qzeros", "scales"))
        columns, words = files.expect(self._name("qweight"), ["I32"], (None, None))
        size = described.group_size or columns
        if columns % size:
            raise self._error("qweight", f"has {columns} columns, which groups of {size} do not divide")
        files.expect(self._name("qzeros"), ["I32"], (columns // size, words))
        files.expect(self._name("scales"), FLOATS, (columns // size, words * _WORD))
        self.shape = (words * _WORD, columns)

    def integers(self, first: int, count: int) -> torch.Tensor:
        """Read the integers of rows."""
        return self._unpacked("qweight", first, count).contiguous().view(torch.int8)

    def scales(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the scales and the zero points of rows."""
        scales = self._files.read(self._name("scales"), slice(None), slice(first, first + count)).float().t()
        return scales.contiguous(), self._unpacked("qzeros", first, count).to(torch.int16).contiguous()

    def _unpacked(self, part: str, first: int, count: int) -> torch.Tensor:
        """Return the integers of rows [count, n]: those of whole words, of which the wanted ones are kept."""
        start, stop = first // _WORD, -(-(first + count) // _WORD)
        words = self._files.read(self._name(part), slice(None), slice(start, stop))
        in_order = four_bit_values(words).view(len(words), -1, _WORD)[:, :, _PLACES].flatten(1)
        return in_order[:, first - start * _WORD :][:, :count].t()
