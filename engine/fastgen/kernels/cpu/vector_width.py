"""Vector width and tile width of the kernels. Needs no numba."""

from __future__ import annotations

import os


def has_wide_vectors() -> bool:
    """Return whether the target processor has 512-bit registers (AVX-512)."""
    from llvmlite import binding  # type: ignore[import-untyped]

    features = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    return "+avx512f" in features.split(",")


VECTORS = 3  # per tile
WIDTH = 16 if has_wide_vectors() else 8
LANES = VECTORS * WIDTH  # columns per tile
