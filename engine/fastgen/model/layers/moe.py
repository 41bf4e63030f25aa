"""Mixtures of experts: the router selects and weights a few experts for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastgen.model.config.architecture import SigmoidRouting
from fastgen.model.layers.weights import MLP, Mixture, SharedExpert

Activate = Callable[[torch.Tensor], torch.Tensor]


def gated(mlp: MLP, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute a gated MLP (Shazeer, 2020): [n, hidden] -> [n, hidden]; `activate` as in `Operations`."""
    return mlp.down(activate(mlp.gate_up(x)))


def mixture_of_experts(mixture: Mixture, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute a mixture of experts (as in Jiang et al., 2024): [T, hidden] -> [T, hidden].

    Rows are grouped by expert, so each expert's products run once over all its rows. Experts of other ranks add
    nothing.
    """
    weights, chosen = route(mixture, x)  # both [T, top k]
    if mixture.input_scales is not None:
        x = (x * mixture.input_scales).to(x.dtype)
    by_expert = chosen.flatten().argsort(stable=True)
    rows = by_expert // mixture.shape.top_k  # [T * top k], sorted by expert
    scales = weights.flatten()[by_expert, None]
    counts = torch.bincount(chosen.flatten(), minlength=mixture.shape.count).tolist()
    out = torch.zeros_like(x)
    own = slice(mixture.own.start, mixture.own.stop)
    shares = zip(mixture.experts, torch.split(rows, counts)[own], torch.split(scales, counts)[own], strict=True)
    for expert, own_rows, own_scales in shares:
        if len(own_rows):
            inputs = x.index_select(0, own_rows)
            if mixture.shape.scales_inputs:
                results = gated(expert, inputs * own_scales, activate)
            else:
                results = gated(expert, inputs, activate) * own_scales
            out.index_add_(0, own_rows, results)
    if mixture.shared is not None:
        out += shared_expert(mixture.shared, x, activate)
    return out


def route(mixture: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and indices of each row's experts, both [T, top k], the weights in x's dtype."""
    experts, logits = mixture.shape, mixture.router(x).float()
    if experts.sigmoid is not None:
        scores = _sigmoid(logits)
        # Uncorrected, the choice is by logits: large ones have the same sigmoid.
        preferred = logits if mixture.correction is None else scores + mixture.correction
        chosen = _eligible(preferred, experts.sigmoid).topk(experts.top_k, dim=-1).indices
        weights, scale = scores.gather(-1, chosen), experts.sigmoid.scale
    else:
        weights, chosen = logits.softmax(-1).topk(experts.top_k, dim=-1)
        scale = 1.0
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if mixture.expert_scales is not None:
        weights = weights * mixture.expert_scales[chosen]
    return (weights * scale).to(x.dtype), chosen


def _eligible(scores: torch.Tensor, routing: SigmoidRouting) -> torch.Tensor:
    """Return scores [T, experts], minus infinity outside of each row's best groups."""
    if routing.groups == 1:
        return scores
    grouped = scores.view(len(scores), routing.groups, scores.shape[1] // routing.groups)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.used_groups, dim=-1).indices  # [T, used groups]
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)


def shared_expert(shared: SharedExpert, x: torch.Tensor, activate: Activate) -> torch.Tensor:
    """Compute the shared expert, times the sigmoid of its gate if it has one: [T, hidden] -> [T, hidden]."""
    out = gated(shared.mlp, x, activate)
    return out if shared.gate is None else out * _sigmoid(shared.gate(x))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of each element.

    On CPUs torch's own computes what is left of a tensor after whole vectors by other code, so that a row's last bits
    depend on the number of rows. Its exp does not.
    """
    if x.device.type != "cpu":
        return x.sigmoid()
    return (1 + (-x.float()).exp()).reciprocal().to(x.dtype)
