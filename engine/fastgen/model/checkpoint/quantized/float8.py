"""Weights in float8 e4m3 with one scale for the tensor, for each row, or for each block of rows and columns.

`weight` has the values. Scales are in `weight_scale` (compressed-tensors, ModelOpt, vLLM) or `weight_scale_inv`
(transformers, DeepSeek, Qwen), by which values are multiplied in both cases. Sources: `Fp8Dequantize` in transformers
5.23, integrations/finegrained_fp8.py; `dequantize` in compressed-tensors 0.20, quantization/lifecycle/forward.py.
"""

from __future__ import annotations

import torch

from fastgen.model.checkpoint.checkpoint import StoredTensor
from fastgen.model.checkpoint.quantized.matrices import Float8Matrix
from fastgen.model.checkpoint.quantized.weight import FLOATS, QuantizedTensor, QuantizedWeight
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import Float8

_SCALES = ("weight_scale", "weight_scale_inv")
_EXPONENTS = ("F8_E8M0", "U8")  # scales that are powers of 2
# Static scales of activations: activations are not quantised, or with a scale for each row.
_UNREAD = ("input_scale", "activation_scale")


class Float8Weight(QuantizedWeight):
    """A matrix in float8."""

    def __init__(self, files: TensorFiles, module: str, described: Float8) -> None:
        super().__init__(files, module, ("weight", *_SCALES), _UNREAD)
        self.quantises_activations = described.quantises_activations
        rows, columns = self.shape = files.expect(self._name("weight"), ["F8_E4M3"], (None, None))
        self._scale = next((part for part in _SCALES if self._name(part) in files), _SCALES[0])
        block = described.block
        shape: tuple[int, ...]
        if self._name(self._scale) in files and files.shape(self._name(self._scale)) in ((), (1,)):
            self._block, shape = (rows, columns), files.shape(self._name(self._scale))
        elif block is not None:
            self._block, shape = block, (-(-rows // block[0]), -(-columns // block[1]))
        elif self._name(self._scale) in files and len(files.shape(self._name(self._scale))) == 1:
            self._block, shape = (1, columns), (rows,)
        else:
            self._block, shape = (1, columns), (rows, 1)
        files.expect(self._name(self._scale), (*FLOATS, *_EXPONENTS), shape)

    @property
    def has_row_scales(self) -> bool:
        """Whether the values of a row have one scale."""
        return self._block[1] >= self.shape[1]

    def read(self, first: int, count: int) -> Float8Matrix:
        """Read rows, each with its own scales."""
        return Float8Matrix(self.values(first, count), self.scales(first, count), self._block[1])

    def values(self, first: int, count: int) -> torch.Tensor:
        """Read the values of rows, float8_e4m3fn [count, columns]."""
        return self._files.read(self._name("weight"), slice(first, first + count))

    def scales(self, first: int, count: int) -> torch.Tensor:
        """Read the scales of rows, float32 [count, blocks]."""
        scales = self._files.read(self._name(self._scale))
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        height, width = self._block
        scales = scales.float().reshape(-(-self.shape[0] // height), -(-self.shape[1] // width))
        return scales.index_select(0, torch.arange(first, first + count).div_(height, rounding_mode="floor"))


class Float8Rows(QuantizedTensor):
    """Rows whose values stay in float8: those of a weight with one scale for each row; see `of`."""

    weight: Float8Weight

    @classmethod
    def of(cls, part: StoredTensor) -> Float8Rows | None:
        """Return a stored tensor's rows; None if it has other scales, or was not made for activations in float8."""
        if not isinstance(part, QuantizedTensor) or not isinstance(weight := part.weight, Float8Weight):
            return None
        if not weight.has_row_scales or not weight.quantises_activations:
            return None
        return cls(weight, part.first, part.shape, part.selected)

    def values(self) -> torch.Tensor:
        """Read the values without their scales."""
        values = self.weight.values(self.first, self.shape[0])
        return values if self.selected is None else values[:, self.selected.start : self.selected.stop].contiguous()

    def scales(self) -> torch.Tensor:
        """Read the scales of the rows, float32 [rows]."""
        return self.weight.scales(self.first, self.shape[0]).squeeze(1)
