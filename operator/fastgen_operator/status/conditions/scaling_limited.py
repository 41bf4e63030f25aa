"""The condition ScalingLimited."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition, as_before

SCALING_LIMITED: Final = "ScalingLimited"
"""Whether a bound or rate limit overrides the number of replicas that the load requires. Source: the autoscaler's last
decision.
True: VolumeOnOneNode (the node of the ReadWriteOnce volume has no room for another replica), TooManyReplicas
(maxReplicas; stays True until the load of a full scale-down window fits), TooFewReplicas (minReplicas or a schedule),
RateLimited (scaling up continues as scaleUp allows). False: WithinBounds, ScalingDisabled (no spec.autoscaling).
Unknown: NotObserved (no decision yet). After an operator restart, the previous condition is kept until the first
decision."""


def scaling_limited(spec: Spec, observed: Observed) -> Condition:
    """Compute the condition ScalingLimited."""
    if spec.autoscaling is None:
        message = "spec.autoscaling is not set: the number of replicas is spec.replicas"
        return Condition(SCALING_LIMITED, "False", "ScalingDisabled", message)
    decision = observed.decision
    if decision is None:
        return as_before(SCALING_LIMITED, observed, "the autoscaler has not made a decision yet")
    if decision.limit is not None:
        return Condition(SCALING_LIMITED, "True", decision.limit.reason, decision.limit.message)
    return Condition(SCALING_LIMITED, "False", "WithinBounds", "the desired replicas are within the bounds")
