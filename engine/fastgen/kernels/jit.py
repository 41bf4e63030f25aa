"""The one way kernels are compiled here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastgen.kernels import environment

environment.prepare()

import numba  # noqa: E402  (reads the environment when it is imported)

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(*signatures: str, parallel: bool = True) -> Callable[[Function], Function]:
    """Compiles a function with numba, for the given signatures at once or lazily without any.

    fastmath: sums may be reordered, which is what lets LLVM vectorise them; no kernel relies on NaN or infinity.
    Compiled code is kept on disk where `environment.prepare` found a folder for it.
    """
    return numba.njit(
        list(signatures) or None,
        parallel=parallel,
        fastmath=True,
        error_model="numpy",
        cache=bool(numba.config.CACHE_DIR),
    )
