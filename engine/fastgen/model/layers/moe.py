"""Mixtures of experts: the router selects and weights a few experts for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastgen.model.layers.weights import MLP, Mixture, SharedExpert

Activate = Callable[[torch.Tensor], torch.Tensor]


def gated(mlp: MLP, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute a gated MLP (Shazeer, 2020): [n, hidden] -> [n, hidden]; `activate` as in `Operations`."""
    return mlp.down(activate(mlp.gate_up(x)))


def mixture_of_experts(mixture: Mixture, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute a mixture of experts (as in Jiang et al., 2024): [T, hidden] -> [T, hidden].

    Rows are grouped by expert, so each expert's products run once over all its rows.
    """
    weights, chosen = route(mixture, x)  # both [T, top k]
    by_expert = chosen.flatten().argsort(stable=True)
    rows = by_expert // mixture.shape.top_k  # [T * top k], sorted by expert
    scales = weights.flatten()[by_expert, None]
    counts = torch.bincount(chosen.flatten(), minlength=mixture.shape.count).tolist()
    out = torch.zeros_like(x)
    shares = zip(mixture.experts, torch.split(rows, counts), torch.split(scales, counts), strict=True)
    for expert, own_rows, own_scales in shares:
        if len(own_rows):
            out.index_add_(0, own_rows, gated(expert, x.index_select(0, own_rows), activate) * own_scales)
    if mixture.shared is not None:
        out += shared_expert(mixture.shared, x, activate)
    return out


def route(mixture: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indices of each row's experts, both [T, top k], the weights in x's dtype."""
    probabilities = mixture.router(x).float().softmax(-1)
    weights, chosen = probabilities.topk(mixture.shape.top_k, dim=-1)
    if mixture.shape.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), chosen


def shared_expert(shared: SharedExpert, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute the shared expert, times the sigmoid of its gate: [T, hidden] -> [T, hidden]."""
    return gated(shared.mlp, x, activate) * torch.sigmoid(shared.gate(x))
