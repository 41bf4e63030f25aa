"""Operators of norms and gated activations.

Source: RMS norms, Zhang and Sennrich (2019); sandwich norms, Gemma 2; gated activations, Shazeer (2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.operators import register

MAX_HIDDEN = 16384  # a program of the kernel holds a whole row in its registers


def add_rms_norm(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    update_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Add `update` to `stream` in place and return the RMS norm of the sum, in one launch.

    Args:
        stream: [T, hidden], contiguous, hidden at most 16384; bfloat16, float16 or float32.
        update: as `stream`, or None to normalise only.
        update_weight: [hidden] float32, to normalise `update` before it is added (sandwich norms), or None. Only with
            an update.
        weight: [hidden] float32.
        eps: added to the mean square, in both norms.

    Returns:
        [T, hidden] in stream's dtype. Norms are computed in float32; each norm and the sum are rounded to that dtype.

    Raises:
        ValueError: if `update_weight` is given without `update`, or hidden is too large.
    """
    if update is None and update_weight is not None:
        raise ValueError("update_weight needs an update")
    if stream.shape[1] > MAX_HIDDEN:
        raise ValueError(f"hidden is {stream.shape[1]}, more than {MAX_HIDDEN}")
    normed: torch.Tensor = torch.ops.fastgen.add_rms_norm(stream, update, update_weight, weight, eps)
    return normed


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up in one launch.

    Args:
        gate_up: [T, 2 * width], contiguous, the gate first; bfloat16, float16 or float32.
        activation: `silu` or `gelu_tanh`.

    Returns:
        [T, width] in gate_up's dtype, to which the activation is rounded before the product.

    Raises:
        ValueError: for another activation.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}: only silu and gelu_tanh are known")
    product: torch.Tensor = torch.ops.fastgen.gated_activation(gate_up, activation)
    return product


def _add_rms_norm_twin(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    update_weight: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if update is not None:
        stream += update if update_weight is None else rms_norm(update, update_weight, eps)
    return rms_norm(stream, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Return silu(gate), or gelu(gate) in its tanh form."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _gated_activation_twin(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activated(gate, activation) * up


register(
    "add_rms_norm(Tensor(a!) stream, Tensor? update, Tensor? update_weight, Tensor weight, float eps) -> Tensor",
    kernel="elementwise.add_rms_norm",
    twin=_add_rms_norm_twin,
)
register(
    "gated_activation(Tensor gate_up, str activation) -> Tensor",
    kernel="elementwise.gated_activation",
    twin=_gated_activation_twin,
)
