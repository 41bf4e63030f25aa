"""Operators of mixtures of experts, without a synchronisation or a loop over experts on the host.

Source: Jiang et al. (2024); products grouped by expert, Gale et al. (2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastgen.kernels.gpu.elementwise import ACTIVATIONS, check_activation
from fastgen.kernels.gpu.operators import operator

MAX_EXPERTS, MAX_TOP_K = 512, 16


@operator()
def route_experts(router_logits: torch.Tensor, top_k: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose and weight each token's experts in one launch.

    Args:
        router_logits: [T, E], contiguous, E at most 512; bfloat16, float16 or float32.
        top_k: experts of a token, at most 16. Of equal logits, the lower index is chosen first.
        normalised: whether the weights of a token are normalised to sum to 1.

    Returns:
        weights [T, top_k], the softmax over all experts, computed in float32 and rounded to the logits' dtype, largest
        first; and expert ids [T, top_k] int32, which lie within the experts even if logits are NaN.

    Raises:
        ValueError: for more experts than the kernel takes, or a `top_k` out of range.
    """
    check_routing(router_logits.shape[1], top_k)
    logits = router_logits.float()
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(-1, chosen)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), chosen.int()


@operator()
def experts(
    x: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
    gate_up_biases: torch.Tensor | None = None,
    down_biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a mixture's experts in five launches.

    The result does not depend on the order in which programs run.

    Args:
        x: [T, hidden], contiguous; bfloat16, float16 or float32.
        gate_up_weights: [E, 2 * width, hidden], contiguous, the gate first, in x's dtype; E at most 512.
        down_weights: [E, hidden, width], contiguous, in x's dtype.
        weights: [T, top k], contiguous, of `route_experts`.
        expert_ids: [T, top k] int32, contiguous; a negative one adds nothing.
        activation: one of `elementwise.ACTIVATIONS`.
        gate_up_biases, down_biases: float32 [E, 2 * width] and [E, hidden], contiguous, or both None.

    Returns:
        [T, hidden] in x's dtype. Each product is rounded to it, before and after its bias, and so is an expert's output
        times its weight; the sum over experts is computed in float32 in the order of `expert_ids`.

    Raises:
        ValueError: for another activation, or one bias without the other.
    """
    check_experts(activation, gate_up_biases, down_biases)
    shares = x.new_zeros(*expert_ids.shape, x.shape[1])  # [T, top k, hidden]
    for expert, (gate_up, down) in enumerate(zip(gate_up_weights, down_weights, strict=True)):
        rows, ranks = torch.nonzero(expert_ids == expert, as_tuple=True)
        gates = _biased(F.linear(x[rows], gate_up), gate_up_biases, expert)
        product = _biased(F.linear(ACTIVATIONS[activation](gates), down), down_biases, expert)
        shares[rows, ranks] = (product.float() * weights[rows, ranks, None].float()).to(x.dtype)
    return shares.float().sum(1).to(x.dtype)


def _biased(product: torch.Tensor, biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    return product if biases is None else product.add_(biases[expert])


def check_experts(activation: str, gate_up_biases: torch.Tensor | None, down_biases: torch.Tensor | None) -> None:
    """Raise a ValueError for an unknown activation, or one bias without the other."""
    check_activation(activation)
    if (gate_up_biases is None) != (down_biases is None):
        raise ValueError("gate_up_biases and down_biases must be given together")


def check_routing(num_experts: int, top_k: int) -> None:
    """Raise a ValueError for numbers that `route_experts` does not take."""
    if num_experts > MAX_EXPERTS or not 0 < top_k <= min(MAX_TOP_K, num_experts):
        raise ValueError(
            f"top {top_k} of {num_experts} experts: 1 to {MAX_TOP_K} of at most {MAX_EXPERTS} are supported, no more "
            "than there are"
        )
