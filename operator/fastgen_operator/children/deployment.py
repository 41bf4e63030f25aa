"""The Deployment of the engine pods, and their PodDisruptionBudget."""

from __future__ import annotations

from fastgen_operator.api import Spec
from fastgen_operator.children.metadata import child, selector
from fastgen_operator.children.template import build_template
from fastgen_operator.kinds import DEPLOYMENT, POD_DISRUPTION_BUDGET, Object


def build_deployment(owner: Object, spec: Spec, engine_image: str, replicas: int) -> Object:
    """Build the Deployment with `replicas` replicas; `engine_image` is the default image.

    Raises:
        TemplateRefused: spec.podTemplate cannot be applied.
    """
    name = owner["metadata"]["name"]
    update = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    fields = {
        "replicas": replicas,
        "selector": {"matchLabels": selector(name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
        "template": build_template(name, spec, engine_image),
    }
    return child(DEPLOYMENT, owner, {"spec": fields})


def build_disruption_budget(owner: Object, min_available: int | None, replicas: int) -> Object:
    """Build the PodDisruptionBudget for `replicas` desired replicas.

    The budget always allows one eviction at a time: if it required all replicas, a node drain would block until an
    administrator deletes the budget. With a single replica, the model is reloaded on another node.

    Args:
        min_available: replicas that must stay available; None for all but one.
    """
    one_at_a_time = min_available is None or min_available >= replicas
    spec = {
        **({"maxUnavailable": 1} if one_at_a_time else {"minAvailable": min_available}),
        "selector": {"matchLabels": selector(owner["metadata"]["name"])},
        # An unhealthy pod must not block a node drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child(POD_DISRUPTION_BUDGET, owner, {"spec": spec})
