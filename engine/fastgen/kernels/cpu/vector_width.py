"""Vector width, tile width, cache lines and instructions of the kernels' target processor. Needs no numba."""

from __future__ import annotations

import os

CACHE_LINE = 64  # bytes


def has_wide_vectors() -> bool:
    """Return whether the target processor has 512-bit registers (AVX-512)."""
    return "+avx512f" in _features()


def has_vnni() -> bool:
    """Return whether the target processor multiplies vectors of 64 bytes (AVX512-VNNI)."""
    return {"+avx512f", "+avx512vnni"} <= _features()


def has_bfloat16() -> bool:
    """Return whether the target processor multiplies vectors of 32 bfloat16 (AVX512-BF16)."""
    return {"+avx512f", "+avx512bf16"} <= _features()


def has_byte_products(bits: int) -> bool:
    """Return whether the target processor multiplies bytes in vectors of 256 bits (AVX2), or of 512 (AVX512-BW)."""
    return {256: "+avx2", 512: "+avx512bw"}[bits] in _features()


def converts_float16() -> bool:
    """Return whether the target processor converts vectors of float16 to float32 (F16C)."""
    return "+f16c" in _features()


def _features() -> set[str]:
    from llvmlite import binding  # type: ignore[import-untyped]

    features: str = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    return set(features.split(","))


VECTORS = 3  # per tile
WIDTH = 16 if has_wide_vectors() else 8
TILE_COLUMNS = VECTORS * WIDTH  # columns per tile
