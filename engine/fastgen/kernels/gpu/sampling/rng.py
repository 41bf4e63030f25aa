"""Counter-based random numbers.

They are functions of (seed, position), the same on every machine and in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each pair of seed and position, both from 0 to 2^63 - 1."""
    golden = np.uint64(_GOLDEN)
    hashed = _mix_all(np.asarray(seeds, np.uint64) + golden)
    bits = _mix_all(hashed + (np.asarray(positions, np.uint64) + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)) / float(1 << 53)


def uniform(seed: int, position: int) -> float:
    """Return one number in [0, 1) by SplitMix64 (Steele et al., 2014): the readable twin of `uniforms`."""
    bits = _mix((_mix((seed + _GOLDEN) & _MASK64) + (position + 1) * _GOLDEN) & _MASK64)
    return (bits >> 11) / float(1 << 53)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK64
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK64
    return z ^ (z >> 31)


def _mix_all(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
