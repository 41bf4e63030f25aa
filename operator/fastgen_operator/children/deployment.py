"""The Deployment of the engine pods, and their PodDisruptionBudget."""

from __future__ import annotations

from typing import Any

from fastgen_operator.children.desired import Desired
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import REVISION_ANNOTATION


def build_deployment(desired: Desired, template: Object, held_revision: str = "") -> Object:
    """Build the Deployment of pods with this template.

    Args:
        held_revision: the revision of a template that is not the spec's; empty for the spec's.
    """
    rollout = desired.spec.rollout
    update = {"maxSurge": rollout.max_surge, "maxUnavailable": desired.max_unavailable}
    spec = {
        "replicas": desired.replicas,
        "selector": {"matchLabels": desired.selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
        "progressDeadlineSeconds": rollout.progress_deadline_seconds,
        "template": template,
    }
    held = {"annotations": {REVISION_ANNOTATION: held_revision}} if held_revision else {}
    return {"metadata": {"labels": desired.queue, **held}, "spec": spec}


def build_disruption_budget(desired: Desired) -> Object:
    """Build the PodDisruptionBudget.

    A node can always be drained: if the budget required all replicas, a drain would block until an administrator
    deletes the budget. With a single replica, the model is reloaded on another node. Replicas that run on one node move
    together: a replacement of the first cannot start elsewhere while the others hold the volume.
    """
    least = desired.spec.disruption.min_available
    if desired.spec.runs_on_one_node:
        allowed: dict[str, Any] = {"maxUnavailable": "100%"}
    else:
        allowed = {"maxUnavailable": 1} if least is None or least >= desired.replicas else {"minAvailable": least}
    # An unhealthy pod must not block a node drain.
    always = {"unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return {"spec": {**allowed, "selector": {"matchLabels": desired.selector}, **always}}
