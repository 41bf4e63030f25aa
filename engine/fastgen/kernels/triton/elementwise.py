"""Triton kernels of norms and gated activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.elementwise import ACTIVATIONS, MAX_HIDDEN, check_activation, check_norm
from fastgen.kernels.triton.variant import Variant

_ACTIVATION_BLOCK, _ACTIVATION_WARPS = 1024, 4


def add_rms_norm(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    update_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launch `_add_rms_norm`; see `fastgen.kernels.gpu.elementwise.add_rms_norm`."""
    check_norm(stream, update, update_weight)
    rows, hidden = stream.shape
    normed = torch.empty_like(stream)
    if rows:
        block, num_warps = _norm_configuration(hidden)
        _add_rms_norm[(rows,)](
            stream, update, update_weight, weight, normed, hidden, eps, BLOCK=block, num_warps=num_warps
        )
    return normed


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Launch `_gated_activation`; see `fastgen.kernels.gpu.elementwise.gated_activation`."""
    check_activation(activation)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _gated_activation[(rows, triton.cdiv(width, _ACTIVATION_BLOCK))](
            gate_up, out, width, ACTIVATION=activation, BLOCK=_ACTIVATION_BLOCK, num_warps=_ACTIVATION_WARPS
        )
    return out


def _norm_configuration(hidden: int) -> tuple[int, int]:
    """Return the columns of a program, which holds a whole row, and its warps: 16 columns a thread where possible."""
    block = max(128, triton.next_power_of_2(hidden))
    return block, min(max(block // 512, 1), 32)


@triton.jit
def _add_rms_norm(stream, update, update_weight, weight, normed, hidden, eps, BLOCK: tl.constexpr):
    """Add and normalise one row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    offsets = tl.program_id(0).to(tl.int64) * hidden + columns
    x = tl.load(stream + offsets, mask=inside, other=0.0)
    if update is not None:
        change = tl.load(update + offsets, mask=inside, other=0.0)
        if update_weight is not None:
            change = _normalised(change, update_weight, columns, inside, hidden, eps)
        x = (x.to(tl.float32) + change.to(tl.float32)).to(x.dtype)
        tl.store(stream + offsets, x, mask=inside)
    tl.store(normed + offsets, _normalised(x, weight, columns, inside, hidden, eps), mask=inside)


@triton.jit
def _normalised(x, weight, columns, inside, hidden, eps):
    """Return the RMS norm of a row [BLOCK] in its dtype; columns not `inside` are 0."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    return (wide * scale * tl.load(weight + columns, mask=inside, other=0.0)).to(x.dtype)


@triton.jit
def _gated_activation(gate_up, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    product = activated.to(tl.float32) * factor(up.to(tl.float32), ACTIVATION)
    tl.store(out + row * width + columns, product.to(gate.dtype), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return silu(x), gelu(x) in its tanh form, or the gate of gpt-oss, of x in float32."""
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "clamped_swiglu")
    exponent = x
    if ACTIVATION == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)  # unlike a minimum, keeps NaN
        exponent = 1.702 * x
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-exponent))


@triton.jit
def factor(up, ACTIVATION: tl.constexpr):
    """Return the factor of the activated gate, in float32."""
    if ACTIVATION == "clamped_swiglu":
        up = tl.where(up > 7.0, 7.0, up)
        up = tl.where(up < -7.0, -7.0, up) + 1.0
    return up


def _norm_variants() -> Iterator[Variant]:
    """Yield all configurations in bfloat16, and the widest in the other dtypes."""
    hiddens = [128 << shift for shift in range((MAX_HIDDEN // 128).bit_length())]
    for hidden, dtype in [*((hidden, "bf16") for hidden in hiddens), (MAX_HIDDEN, "fp16"), (MAX_HIDDEN, "fp32")]:
        block, num_warps = _norm_configuration(hidden)
        types = dict.fromkeys(("stream", "normed"), f"*{dtype}:16")
        types |= {"weight": "*fp32:16", "hidden": "i32:16", "eps": "fp32"}
        update, update_weight = {"update": f"*{dtype}:16"}, {"update_weight": "*fp32:16"}
        for name, given in (("", {}), ("_add", update), ("_norm_add", update | update_weight)):
            absent = dict.fromkeys((update | update_weight).keys() - given.keys())
            yield Variant(f"{dtype}_{block}{name}", _add_rms_norm, types | given, {"BLOCK": block} | absent, num_warps)


def _activation_variants() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16", "fp32"):
        signature = {"gate_up": f"*{dtype}:16", "out": f"*{dtype}:16", "width": "i32:16"}
        for activation in ACTIVATIONS:
            constants = {"ACTIVATION": activation, "BLOCK": _ACTIVATION_BLOCK}
            yield Variant(f"{dtype}_{activation}", _gated_activation, signature, constants, _ACTIVATION_WARPS)


VARIANTS = (*_norm_variants(), *_activation_variants())
