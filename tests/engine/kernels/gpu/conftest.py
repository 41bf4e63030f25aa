"""Triton's interpreter for the tests of this folder.

`@triton.jit` reads TRITON_INTERPRET when it decorates, Triton's own library functions included. So a process that has
imported Triton for compilation cannot interpret with it, and the reverse. The fixture `interpreted` therefore imports a
second copy of Triton and of `fastgen.kernels.triton`, and puts it into `sys.modules` for the duration of a test.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import fastgen.kernels

_COPIED = ("triton", "fastgen.kernels.triton")
_SHARED = ("triton._C",)  # Triton's shared library registers its types once in a process


def _is_copied(name: str) -> bool:
    return _is_within(name, _COPIED) and not _is_within(name, _SHARED)


def _is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _take_copied() -> dict[str, ModuleType]:
    """Remove the modules that exist twice from `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_copied(name)}


def _patch_index(interpreter: ModuleType) -> None:
    """Let loops run to loaded numbers: triton 3.6 makes an int of an array [1], which numpy rejects since 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor  # type: ignore[attr-defined]


def _patch_once_per_launch(interpreter: ModuleType) -> None:
    """Save a third of the interpreter's time: it patches the language again at each call of a device function.

    It also builds a table of all types at each look-up of one.
    """
    patch, patched = interpreter._patch_lang, set[str]()

    @functools.cache
    def languages(function: FunctionType) -> frozenset[str]:
        """Return the names of the modules that calls of the function patch."""
        values = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(value.__name__ for value in values) & {"triton.language", "triton.language.core"}

    def patch_once(function: FunctionType) -> Any:
        if patched and languages(function) <= patched:
            return None  # a device function, whose caller restores nothing
        scope, is_launch = patch(function), not patched
        patched.update(languages(function))
        if is_launch:
            restore = scope.restore

            def end_launch() -> None:
                patched.clear()
                restore()

            scope.restore = end_launch
        return scope

    look_up = interpreter._get_np_dtype
    of_scalar = functools.cache(look_up)

    def numpy_type(kind: Any) -> Any:
        return of_scalar(kind) if type(kind) is interpreter.tl.dtype else look_up(kind)  # the others have no hash

    interpreter._patch_lang = patch_once  # type: ignore[attr-defined]
    interpreter._get_np_dtype = numpy_type  # type: ignore[attr-defined]


def _patch_float8(interpreter: ModuleType) -> None:
    """Round to float8 as a GPU does: the interpreter loses the carry where a value rounds up to a power of 2."""
    convert = interpreter._convert_float

    def convert_float(values: Any, kind: Any, target: Any, rounding: Any) -> Any:
        if (kind.name, target.name) != ("fp32", "fp8e4nv"):
            return convert(values, kind, target, rounding)
        return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def _interpreted_modules() -> dict[str, ModuleType]:
    return {}


@pytest.fixture
def interpreted(
    monkeypatch: pytest.MonkeyPatch, _interpreted_modules: dict[str, ModuleType]
) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports `fastgen.kernels.triton.NAME` so that its kernels run in the interpreter.

    TRITON_INTERPRET is set during the test only, and not while test modules are imported: operators called by
    `torch.ops.fastgen` run their twins.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    package = vars(fastgen.kernels).pop("triton", None)
    compiled = _take_copied()
    sys.modules.update(_interpreted_modules)
    if not _interpreted_modules:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        _patch_index(interpreter)
        _patch_once_per_launch(interpreter)
        _patch_float8(interpreter)
    try:
        yield lambda name: importlib.import_module(f"fastgen.kernels.triton.{name}")
    finally:
        _interpreted_modules.update(_take_copied())
        sys.modules.update(compiled)
        vars(fastgen.kernels).pop("triton", None)
        if package is not None:
            vars(fastgen.kernels)["triton"] = package
