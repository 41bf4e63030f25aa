"""Decorators that compile kernels, and the parts of numba that kernels use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from fastgen.kernels.cpu import environment

environment.prepare()
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", f"{__name__}.PackageLocator,UserProvidedCacheLocator")

import numba  # noqa: E402  (reads the environment when it is imported)
import numba.core.caching  # noqa: E402
import numba.core.cgutils  # noqa: E402
import numba.extending  # noqa: E402

# Kernels import these from here, because numba must not be imported before the lines above.
prange = numba.prange
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic  # for functions that emit LLVM code themselves, with `lowering`
lowering: Any = numba.core.cgutils

_PACKAGE = Path(__file__).parent
_DIGEST = environment.source_digest()

Function = TypeVar("Function", bound=Callable[..., Any])

# Type of the elements of activations and cache, E in signatures. Numba has no bfloat16: kernels take its bits as int16
# (`elements`).
_FLOAT32, _BFLOAT16 = "f4", "i2"

# Products and sums may fuse, and sums may be reordered so that LLVM vectorises them. Nothing else is relaxed: kernels
# meet infinities (overflowed exponentials, scores of 1e38). With `arcp`, `ninf` and `nnan` LLVM divides by an estimate
# of the reciprocal and a Newton step, which makes NaN of a division by infinity.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract", "reassoc"}, "error_model": "numpy"}


class PackageLocator(numba.core.caching.UserProvidedCacheLocator):
    """Finds a kernel in numba's cache by its place in this package and the source of all kernels.

    So all copies of the same source share compiled kernels: environments, clones, and pods that mount another path.
    Code is compiled again if any module has changed, because kernels inline functions of others. By itself, numba looks
    at the path and at the kernel's own file.
    https://numba.readthedocs.io/en/stable/reference/envvars.html#envvar-NUMBA_CACHE_LOCATOR_CLASSES
    """

    def get_source_stamp(self) -> str:
        return _DIGEST

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return "_".join(Path(py_file).parent.relative_to(_PACKAGE.parent).parts)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        """Return None for a function outside the package: numba then takes the next class."""
        make: Any = super().from_function
        return make(py_func, py_file) if Path(py_file).is_relative_to(_PACKAGE) else None


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile a function for one signature immediately; its `prange` loops run on all threads.

    The signature's E is float32; `compile_for_bfloat16` adds the other element type. The code is cached on disk if
    `environment.prepare` found a folder.
    """

    def compile_now(function: Function) -> Function:
        cache = bool(os.environ.get("NUMBA_CACHE_DIR"))
        made: Any = numba.njit(signature.replace("E", _FLOAT32), parallel=True, cache=cache, **_OPTIONS)(function)
        made.element_signature = signature
        return cast("Function", made)

    return compile_now


def compile_for_bfloat16(compiled: Callable[..., Any]) -> None:
    """Compile a kernel for bfloat16 elements too. A call then takes the version of its arrays' type."""
    dispatcher: Any = compiled
    dispatcher.disable_compile(False)
    dispatcher.compile(dispatcher.element_signature.replace("E", _BFLOAT16))
    dispatcher.disable_compile()


def serial(function: Function) -> Function:
    """Compile a function for calls from kernels, which inline it. It has no parallel loops of its own."""
    compiled: Function = numba.njit(**_OPTIONS)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Insert a function's code into each kernel that calls it, which runs its `prange` loops on all threads."""
    compiled: Function = numba.njit(inline="always", **_OPTIONS)(function)
    return compiled
