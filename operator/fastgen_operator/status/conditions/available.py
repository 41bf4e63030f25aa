"""The condition Available: whether all desired replicas of the current template are ready. Source: the pods.

Replicas that the autoscaler added do not count while they wait for a node or start for the first time, if at least
spec.autoscaling.minReplicas are ready, at least one, and no pod of an older template is.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, false, not_observed, true

AVAILABLE: Final = "Available"


def available(situation: Situation) -> Condition:
    """Compute the condition Available."""
    observed = situation.observed
    if observed.deployment is None or not observed.deployment.is_observed:
        return not_observed(situation)
    wanted = situation.desired_replicas
    if wanted == 0 and situation.spec.is_autoscaled:
        return true("ScaledToZero", "idle: the gateway holds the next request, and it starts a replica")
    if wanted == 0:
        return true("ScaledToZero", "scaled to 0 replicas: no requests are served")
    pods = observed.current_pods
    waiting = [pod for pod in pods if not pod.is_ready]
    count = len(pods) - len(waiting)
    message = f"{count} of {wanted} replicas ready"
    if count >= wanted:
        return true("AllReplicasReady", message)
    first = f"; {situation.unready_state}" if waiting else ""
    older = sum(pod.is_ready for pod in observed.older_pods)
    scales_up = all(pod.is_starting or pod.pending is not None for pod in waiting)
    if situation.spec.has_minimum(count) and not older and scales_up:
        return true("ScalingUp", message + first)
    serving = f" ({older} of an older revision still {'serves' if older == 1 else 'serve'})" if older else ""
    return false("ReplicasNotReady", message + serving + first)
