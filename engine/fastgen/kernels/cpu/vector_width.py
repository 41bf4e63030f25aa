"""Vector width, tile width and instructions of the kernels' target processor. Needs no numba."""

from __future__ import annotations

import os


def has_wide_vectors() -> bool:
    """Return whether the target processor has 512-bit registers (AVX-512)."""
    return "+avx512f" in _features()


def has_vnni() -> bool:
    """Return whether the target processor multiplies vectors of 64 bytes (AVX512-VNNI)."""
    return {"+avx512f", "+avx512vnni"} <= _features()


def _features() -> set[str]:
    from llvmlite import binding  # type: ignore[import-untyped]

    features: str = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    return set(features.split(","))


VECTORS = 3  # per tile
WIDTH = 16 if has_wide_vectors() else 8
TILE_COLUMNS = VECTORS * WIDTH  # columns per tile
