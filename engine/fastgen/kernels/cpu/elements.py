"""Elements of activations and caches in kernels: float32, or bfloat16 as int16 bits.

Kernels compute in float32: they widen what they read and narrow what they write. For float32 both are no-ops.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from fastgen.kernels.cpu import llvm_vectors
from fastgen.kernels.cpu.jit import intrinsic, types

ElementArray = npt.NDArray[Any]  # float32 or int16


def _emit_widened(builder: Any, value: Any) -> Any:
    """Return an element as float32."""
    return value if value.type == llvm_vectors.F32 else llvm_vectors.widened(builder, value)


widened = llvm_vectors.emitted(_emit_widened, returns=types.float32)


@intrinsic
def narrowed(_typing: Any, value: Any, array: Any) -> Any:
    """Return a float32 rounded to an element of `array`."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, _ = arguments
        return value if signature.return_type == types.float32 else llvm_vectors.narrowed(builder, value)

    return array.dtype(value, array), generate


@intrinsic
def is_float32(_typing: Any, array: Any) -> Any:
    """Return whether the elements are float32, a constant in compiled code."""

    def generate(context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return context.get_constant(types.boolean, array.dtype == types.float32)

    return types.boolean(array), generate
