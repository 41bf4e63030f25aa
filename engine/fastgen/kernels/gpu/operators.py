"""Registers the operators `torch.ops.fastgen.*`.

On a GPU an operator launches its Triton kernel. On a CPU it runs its readable twin, or the Triton kernel in Triton's
interpreter if TRITON_INTERPRET=1. So the code path of a GPU can run, and its operations be counted, without one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("fastgen", "FRAGMENT")  # type: ignore[no-untyped-call]
_launches: dict[str, _Launch] = {}  # by operator


def register(schema: str, *, kernel: str, twin: Callable[..., Any]) -> None:
    """Define the operator `fastgen::NAME`.

    Args:
        schema: name and signature in torch's schema language, with every mutated argument marked, as in
            `scale(Tensor(a!) x, float factor) -> ()`.
        kernel: `MODULE.FUNCTION` in `fastgen.kernels.triton`, which launches the Triton kernel; imported on first use.
        twin: the same computation in plain torch.
    """
    name = schema.partition("(")[0]
    launch = _launches[name] = _Launch(kernel)
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, launch, "CUDA")
    _LIBRARY.impl(name, launch if os.environ.get("TRITON_INTERPRET") == "1" else twin, "CPU")


def launch_function(name: str) -> Callable[..., Any]:
    """Return the function that launches the Triton kernels of the operator `fastgen::NAME`."""
    return _launches[name]


class _Launch:
    """A function of `fastgen.kernels.triton`, imported when it is first called."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._function is None:
            module, _, name = self._path.rpartition(".")
            self._function = getattr(importlib.import_module(f"fastgen.kernels.triton.{module}"), name)
        return self._function(*arguments, **keywords)
