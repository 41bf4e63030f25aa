"""Available."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed, current_pods, is_rollout_observed, older_pods
from fastgen_operator.plan.pod_failures import state_of
from fastgen_operator.plan.replicas import wanted_replicas
from fastgen_operator.pods import is_ready, is_starting
from fastgen_operator.status.conditions.condition import Condition, not_observed

AVAILABLE: Final = "Available"
"""Whether every wanted replica of the current template passes its readiness probe now. From the pods.
True: AllReplicasReady; ScaledToZero, because what was asked for is there; ScalingUp, while the autoscaler's further
replicas start for the first time beside at least spec.autoscaling.minReplicas. False: ReplicasNotReady.
Unknown: NotObserved."""


def available(spec: Spec, observed: Observed) -> Condition:
    """See `AVAILABLE`."""
    if observed.deployment is None or not is_rollout_observed(observed.deployment):
        return not_observed(AVAILABLE)
    wanted = wanted_replicas(spec, observed)
    if wanted == 0:
        return Condition(AVAILABLE, "True", "ScaledToZero", "0 replicas are wanted: nothing is served")
    pods = current_pods(observed)
    waiting = [pod for pod in pods if not is_ready(pod)]
    count = len(pods) - len(waiting)
    message = f"{count} of {wanted} replicas ready"
    if count >= wanted:
        return Condition(AVAILABLE, "True", "AllReplicasReady", message)
    first = f"; {state_of(waiting[0])}" if waiting else ""
    older = sum(is_ready(pod) for pod in older_pods(observed))
    enough = spec.autoscaling is not None and count >= max(1, spec.autoscaling.min_replicas)
    if enough and not older and all(is_starting(pod) for pod in waiting):
        return Condition(AVAILABLE, "True", "ScalingUp", message + first)
    serving = f" ({older} of an older revision still serve)" if older else ""
    return Condition(AVAILABLE, "False", "ReplicasNotReady", message + serving + first)
