"""Registers the operators `torch.ops.fastgen.*`.

On a GPU an operator launches its Triton kernel. On a CPU it runs its readable twin, or the Triton kernel in Triton's
interpreter if TRITON_INTERPRET=1. So the code path of a GPU can run, and its operations be counted, without one.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY: Any = torch.library.Library("fastgen", "FRAGMENT")  # type: ignore[no-untyped-call]
_modules: dict[str, str] = {}  # in `fastgen.kernels.triton`, by operator


def operator(*, mutates: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Make a function the operator `fastgen::NAME`, whose twin on CPUs is the function's body.

    On GPUs, calls go to `fastgen.kernels.triton.MODULE.NAME`, which has the same parameters and defaults; MODULE is the
    function's own in `fastgen.kernels.gpu`.

    Args:
        mutates: names of the tensors that are changed in place.
    """

    def register(twin: Function) -> Function:
        name = twin.__name__
        _modules[name] = twin.__module__.removeprefix("fastgen.kernels.gpu.")

        def launch(*arguments: Any) -> Any:
            return launch_function(name)(*arguments)

        _LIBRARY.define(name + torch.library.infer_schema(twin, mutates_args=mutates))
        _LIBRARY.impl(name, launch, "CUDA")
        _LIBRARY.impl(name, launch if os.environ.get("TRITON_INTERPRET") == "1" else twin, "CPU")
        return cast("Function", getattr(torch.ops.fastgen, name))

    return register


def library_operator(on_gpu: Callable[..., Any]) -> Callable[[Function], Function]:
    """Make a function the operator `fastgen::NAME`, for which `on_gpu` launches one kernel of a library on GPUs."""

    def register(twin: Function) -> Function:
        name = twin.__name__
        _LIBRARY.define(name + torch.library.infer_schema(twin, mutates_args=()))
        _LIBRARY.impl(name, on_gpu, "CUDA")
        for key in ("CPU", "Meta"):
            _LIBRARY.impl(name, twin, key)
        return cast("Function", getattr(torch.ops.fastgen, name))

    return register


def has_kernels(name: str) -> bool:
    """Return whether the operator `fastgen::NAME` has Triton kernels."""
    return name in _modules


@functools.cache
def launch_function(name: str) -> Callable[..., Any]:
    """Return the function that launches the Triton kernels of the operator `fastgen::NAME`, imported on first use."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"fastgen.kernels.triton.{_modules[name]}"), name)
    return function
