"""Operators of norms and gated activations.

Source: RMS norms, Zhang and Sennrich (2019); sandwich norms, Gemma 2; gated activations, Shazeer (2020).
"""

from __future__ import annotations

import torch

from fastgen.kernels import reference
from fastgen.kernels.gpu.operators import operator

MAX_HIDDEN = 16384  # a program of the kernel holds a whole row in its registers
ACTIVATIONS = {
    "silu": reference.silu_multiply,
    "gelu_tanh": reference.gelu_tanh_multiply,
    "clamped_swiglu": reference.clamped_swiglu_multiply,
}


@operator(mutates=("stream",))
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
    check_norm(stream, update, update_weight)
    if update is not None:
        stream += rms_norm(update, update_weight, eps)
    return rms_norm(stream, weight, eps)


@operator()
def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, or the clamped form of both, in one launch.

    Args:
        gate_up: [T, 2 * width], contiguous, the gate first; bfloat16, float16 or float32.
        activation: one of `ACTIVATIONS`.

    Returns:
        [T, width] in gate_up's dtype, to which the activation is rounded before the product.

    Raises:
        ValueError: for another activation.
    """
    check_activation(activation)
    return ACTIVATIONS[activation](gate_up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the RMS norm of x, computed in float32, in x's dtype; x itself without a weight."""
    return x if weight is None else reference.rms_norm(x.float(), weight, eps).to(x.dtype)


def check_norm(stream: torch.Tensor, update: torch.Tensor | None, update_weight: torch.Tensor | None) -> None:
    """Raise a ValueError for arguments that `add_rms_norm` does not take."""
    if update is None and update_weight is not None:
        raise ValueError("update_weight needs an update")
    if stream.shape[1] > MAX_HIDDEN:
        raise ValueError(f"hidden is {stream.shape[1]}, more than {MAX_HIDDEN}")


def check_activation(activation: str) -> None:
    """Raise a ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: only {', '.join(ACTIVATIONS)} are known")
