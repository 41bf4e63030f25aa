"""The PodDisruptionBudget: how many replicas a node drain or an upgrade of the nodes has to leave."""

from __future__ import annotations

from fastgen_operator.children.metadata import child, selector
from fastgen_operator.kinds import POD_DISRUPTION_BUDGET, Object


def build_disruption_budget(owner: Object, min_available: int | None, replicas: int) -> Object:
    """The budget for that many wanted replicas; `min_available` is what must stay, None for all but one.

    It never asks for all replicas: a drain could then evict none, and would wait until somebody takes the budget away.
    One pod at a time may always go; with one replica, the model is then loaded again on another node.
    """
    one_at_a_time = min_available is None or min_available >= replicas
    spec = {
        **({"maxUnavailable": 1} if one_at_a_time else {"minAvailable": min_available}),
        "selector": {"matchLabels": selector(owner["metadata"]["name"])},
        # A pod that does not serve is no reason to keep a node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child(POD_DISRUPTION_BUDGET, owner, spec)
