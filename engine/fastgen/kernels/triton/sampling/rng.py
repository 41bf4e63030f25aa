"""Device functions that draw a token: uniform numbers, and the inverse transform of weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform_number(seed, position):
    """Return a float64 in [0, 1) by SplitMix64 of int64 `seed` and `position`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    hashed = _mix(seed.to(tl.uint64) + golden)
    bits = _mix(hashed + (position.to(tl.uint64) + 1) * golden)
    return (bits >> 11).to(tl.float64) / 9007199254740992.0


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def first_beyond(weights, wanted, N: tl.constexpr):
    """Return the first index of positive `weights` [N] float64 whose cumulative sum exceeds `wanted`, else the last."""
    index = tl.arange(0, N)
    found = tl.min(tl.where((tl.cumsum(weights) > wanted) & (weights > 0), index, N))
    last = tl.max(tl.where(weights > 0, index, 0))
    return tl.minimum(found, last)
