"""The number of replicas that is wanted now. Pure."""

from __future__ import annotations

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed


def wanted_replicas(spec: Spec, observed: Observed) -> int:
    """What the spec says; with autoscaling what was decided, or else what there is, within the spec's bounds."""
    if spec.autoscaling is None:
        return 1 if spec.replicas is None else spec.replicas
    bounds = spec.autoscaling
    if observed.decision is not None:
        wanted = observed.decision.replicas
    else:
        wanted = (observed.deployment or {}).get("spec", {}).get("replicas", bounds.min_replicas)
    return max(bounds.min_replicas, min(bounds.max_replicas, wanted))
