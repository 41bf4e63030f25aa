"""Readable twins of the kernels in plain torch.

Tests compare the kernels with them. The operators of `fastgen.kernels.gpu` run some of them on CPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + update and its RMS norm times `weight`.

    The norm is over the last dimension (Zhang and Sennrich, 2019).
    """
    total = x + update
    return total, rms_norm(total, weight, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMS norm of x over the last dimension, times `weight`."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (Su et al., 2021) to the first d dimensions, by halves.

    x [T, heads, head_dim], cosines and sines [T, d / 2].
    """
    d = 2 * cosines.shape[-1]
    a, b = x[..., :d].chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines, x[..., d:]), -1)


def silu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for [T, 2 * intermediate] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, with gelu's tanh form, for [T, 2 * intermediate] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(1.702 * gate) * (up + 1) for [T, 2 * intermediate] with the gate first (gpt-oss).

    The gate is at most 7 and `up` within ± 7. Both factors are computed in float32, and the first one is rounded.
    """
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=7)
    activated = (gate * torch.sigmoid(1.702 * gate)).to(gate_up.dtype)
    return (activated * (up.clamp(-7, 7) + 1)).to(gate_up.dtype)


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention over one sequence's paged keys and values, for its tokens from position `start` on.

    Args:
        queries: [n, heads, head_dim].
        keys, values: [blocks, kv heads, block size, head_dim].
        block_table: the sequence's blocks in order.
        start: position of the first query.
        scale: factor of the scores.
        window: number of keys that a token attends to, including its own; None for all.
        softcap: bound of the scores, applied by tanh (Gemma 2).
        sinks: [heads], an additional score in each softmax, without a value (gpt-oss).

    Returns:
        [n, heads, head_dim].
    """
    n, heads, _ = queries.shape
    group = heads // keys.shape[1]
    length = start + n
    k, v = (
        pages[block_table].to(queries.dtype).transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
        for pages in (keys, values)
    )
    scores = torch.einsum("nhd,hkd->hnk", queries, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(start, length)[:, None] - torch.arange(length)[None, :]  # from query back to key
    visible = (distance >= 0) & (distance < (window or length))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, n, 1)), -1)
    return torch.einsum("hnk,hkd->nhd", scores.softmax(-1)[..., :length], v)


def int8_product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, in] with int8 values [groups, in, lanes] and scales [groups, in / 32, lanes].

    Returns:
        [T, groups * lanes].
    """
    weights = values.float() * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return torch.einsum("ti,gil->tgl", x, weights).flatten(1)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [T, in] in blocks of 32, the last padded with zeros.

    The largest absolute value of a block becomes ± 127.

    Returns:
        int8 [T, blocks, 32], and scales [T, blocks] in float32. A block whose largest absolute value is below 1e-36 has
        values of 0. Scales of blocks with infinity or NaN are not finite.
    """
    blocks = F.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = blocks.abs().amax(2)
    # torch divides a number by a tensor as a product with its reciprocal, which rounds twice.
    inverse = torch.where(largest >= 1e-36, torch.full_like(largest, 127) / largest, 0)
    return (blocks * inverse[..., None]).round().nan_to_num(-127).char(), largest / 127


def int8_dynamic_product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, in], quantised, with int8 values [out, in] and scales [out, in / 32 rounded up].

    The sums of a block are exact. They are multiplied by both scales and added block by block in float32.

    Returns:
        [T, out] in float32.
    """
    quantised, input_scales = quantise(x)
    weights = F.pad(values, (0, -values.shape[1] % 32)).view(len(values), -1, 32)
    sums = torch.einsum("tbi,obi->bto", quantised.int(), weights.int())
    total = torch.zeros(len(x), len(values))
    for block, integers in enumerate(sums):
        # Emulates a fused multiply-add: the product of a 20-bit and a 24-bit significand is exact in double precision.
        product = integers.double() * (input_scales[:, block, None] * scales[:, block])
        total = (total.double() + product).float()
    return total


def packed_product(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, in], quantised, with packed weights [out, in].

    Args:
        x: inputs.
        values: integers [out, in], from which the offset is subtracted.
        scales: float32 [out, n]; n parts of a row have one each.
        minimums: float32 [out, in / 32].

    Returns:
        [T, out] in float64, without the rounding of the kernel's float32 sums.
    """
    quantised, input_scales = quantise(x)
    inputs = (quantised.double() * input_scales.double()[..., None]).flatten(1)
    weights = values.double() * scales.double().repeat_interleave(values.shape[1] // scales.shape[1], 1)
    return inputs @ (weights - minimums.double().repeat_interleave(32, 1)).T
