"""Device functions that find the top tokens of a row without sorting it, and sizes of the rows."""

from __future__ import annotations

import triton
import triton.language as tl

from fastgen.kernels.gpu.sampling.logits import CHUNK

VOCABULARIES = tuple(CHUNK << shift for shift in range(3, 8))  # the largest of each compiled variant


def padded_chunks(vocabulary: int) -> int:
    """Return the number of chunks of a vocabulary, padded to a power of two."""
    chunks: int = triton.next_power_of_2(triton.cdiv(vocabulary, CHUNK))
    return max(8, chunks)


@triton.jit
def top_tokens(
    logits, vocabulary, group_max, num_groups, groups, keys, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """Return the K top tokens [K] of a row in descending order of their logits, ties in ascending order of ids.

    The K groups with the largest maxima contain the K top tokens. If the row has fewer, ids from `vocabulary` follow.

    Args:
        logits: pointer to the row.
        group_max: pointer to the largest logit of each group of GROUP tokens; minus infinity beyond the vocabulary.
        groups: pointer to K int32 of scratch memory.
        keys: pointer to K int64 of scratch memory.
        K, GROUPS: powers of two; GROUPS is at least K and `num_groups`.
    """
    group = tl.arange(0, GROUPS)
    ordered = _ordered(tl.load(group_max + group, mask=group < num_groups, other=float("-inf")))
    chosen, place = _largest(ordered, K)
    tl.store(groups + place, group, mask=chosen)
    tl.debug_barrier()
    candidate = tl.arange(0, K * GROUP)
    token = tl.load(groups + candidate // GROUP) * GROUP + candidate % GROUP
    ordered = _ordered(tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32))
    chosen, place = _largest(ordered, K)
    key = (ordered.to(tl.int64) - (1 << 31)) * (1 << 32) + (0x7FFFFFFF - token)
    tl.store(keys + place, key, mask=chosen)
    tl.debug_barrier()
    key = tl.sort(tl.load(keys + tl.arange(0, K)), descending=True)
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _ordered(x):
    """Return uint32 that order as float32 `x` does; both zeros are equal."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _largest(values, K: tl.constexpr):
    """Return which of `values` [n] uint32 are the K largest, of equals the first, and their indices among these [n]."""
    least = tl.full([], 0, tl.uint32)  # the K-th largest value, bit by bit
    for bit in range(32):
        tried = least | (tl.full([], 0x80000000, tl.uint32) >> bit)
        least = tl.where(tl.sum((values >= tried).to(tl.int32)) >= K, tried, least)
    is_larger = values > least
    # One scan counts both: larger values in the low 16 bits, equal ones in the high 16 bits.
    count = tl.cumsum(tl.where(is_larger, 1, tl.where(values == least, 1 << 16, 0)))
    wanted = K - tl.sum(is_larger.to(tl.int32))
    chosen = is_larger | ((values == least) & ((count >> 16) <= wanted))
    return chosen, (count & 0xFFFF) + tl.minimum(count >> 16, wanted) - 1
