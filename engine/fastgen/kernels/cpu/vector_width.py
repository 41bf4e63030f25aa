"""The vectors that kernels are written in, and what they are laid out for. No numba here."""

from __future__ import annotations

import os


def has_wide_vectors() -> bool:
    """Does this processor, or the one that is compiled for, have registers of 512 bits (AVX-512)?"""
    from llvmlite import binding  # type: ignore[import-untyped]

    features = os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten()
    return "+avx512f" in features.split(",")


VECTORS = 3  # of a tile's columns
WIDTH = 16 if has_wide_vectors() else 8
LANES = VECTORS * WIDTH  # columns of a tile
