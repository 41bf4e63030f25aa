"""Finds the weights of a checkpoint that are stored quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastgen.model import ModelError
from fastgen.model.checkpoint.quantized.awq import AWQWeight
from fastgen.model.checkpoint.quantized.float8 import Float8Weight
from fastgen.model.checkpoint.quantized.gptq import GPTQWeight
from fastgen.model.checkpoint.quantized.integers import IntegerWeight, PackedWeight
from fastgen.model.checkpoint.quantized.mxfp4 import MXFP4Weight
from fastgen.model.checkpoint.quantized.weight import QuantizedWeight
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import AWQ, GPTQ, MXFP4, Float8, Format, Integers, Quantization

_Make = Callable[[TensorFiles, str, Any], QuantizedWeight]
# By the end of the name of the tensor that holds the values; how a format of that kind is read.
_MAKERS: Mapping[str, Mapping[type[Format], _Make]] = {
    ".qweight": {AWQ: AWQWeight, GPTQ: GPTQWeight},
    ".weight_packed": {Integers: PackedWeight},
    "_blocks": {MXFP4: MXFP4Weight},
}
# By the type of a tensor whose name ends with `.weight`.
_MAKERS_BY_TYPE: Mapping[str, Mapping[type[Format], _Make]] = {
    "F8_E4M3": {Float8: Float8Weight},
    "I8": {Integers: IntegerWeight},
}


def quantized_weights(files: TensorFiles, quantization: Quantization) -> dict[str, QuantizedWeight]:
    """Return the quantised weights by the names that the tensors of an unquantised checkpoint have.

    Raises:
        ModelError: naming a tensor that does not fit the description, is missing, or has another type or shape.
    """
    found: dict[str, QuantizedWeight] = {}
    for name in files:
        suffix, makers = _makers(files, name)
        if makers is None:
            continue
        module = name.removesuffix(suffix)
        described = quantization.format_of(module)
        make = makers.get(type(described))
        if make is None:
            kind = type(described).__name__
            raise ModelError(f"{files.directory}: tensor {name}: quantization_config describes this weight as {kind}")
        found[module if suffix == "_blocks" else f"{module}.weight"] = make(files, module, described)
    return found


def _makers(files: TensorFiles, name: str) -> tuple[str, Mapping[type[Format], _Make] | None]:
    for suffix, makers in _MAKERS.items():
        if name.endswith(suffix):
            return suffix, makers
    return ".weight", _MAKERS_BY_TYPE.get(files.type_name(name)) if name.endswith(".weight") else None
