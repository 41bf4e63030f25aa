"""The Deployment of the engine pods, and their PodDisruptionBudget."""

from __future__ import annotations

from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.children.colocation import runs_on_one_node
from fastgen_operator.children.metadata import child, labels, queue_labels, selector
from fastgen_operator.children.platform import PLAIN_PODS, PodSettings
from fastgen_operator.children.template import build_template
from fastgen_operator.kinds import DEPLOYMENT, POD_DISRUPTION_BUDGET, Object


def build_deployment(
    owner: Object, spec: Spec, engine_image: str, replicas: int, settings: PodSettings = PLAIN_PODS
) -> Object:
    """Build the Deployment with `replicas` replicas; `engine_image` is the default image.

    Raises:
        TemplateRefused: spec.podTemplate cannot be applied.
    """
    name = owner["metadata"]["name"]
    template, queue = build_template(name, spec, engine_image, settings), queue_labels(owner, spec)
    template["metadata"]["labels"] |= queue
    update = {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable}
    fields = {
        "replicas": replicas,
        "selector": {"matchLabels": selector(name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
        "template": template,
    }
    return child(DEPLOYMENT, owner, {"spec": fields}, labels={**queue, **labels(name)})


def build_disruption_budget(owner: Object, spec: Spec, replicas: int) -> Object:
    """Build the PodDisruptionBudget for `replicas` desired replicas.

    A node can always be drained: if the budget required all replicas, a drain would block until an administrator
    deletes the budget. With a single replica, the model is reloaded on another node. Replicas that run on one node move
    together: a replacement of the first cannot start elsewhere while the others hold the volume.
    """
    least = spec.disruption.min_available
    if runs_on_one_node(spec):
        allowed: dict[str, Any] = {"maxUnavailable": "100%"}
    else:
        allowed = {"maxUnavailable": 1} if least is None or least >= replicas else {"minAvailable": least}
    fields = {
        **allowed,
        "selector": {"matchLabels": selector(owner["metadata"]["name"])},
        # An unhealthy pod must not block a node drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return child(POD_DISRUPTION_BUDGET, owner, {"spec": fields})
