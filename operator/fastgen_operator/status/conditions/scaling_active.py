"""The condition ScalingActive: whether the replicas follow the load. Source: the autoscaler's last decision.

After an operator restart, the previous condition is kept until the first decision.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, as_before, false, true

SCALING_ACTIVE: Final = "ScalingActive"
DISABLED: Final = "spec.autoscaling is not set: the number of replicas is spec.replicas"
UNDECIDED: Final = "the autoscaler has not made a decision yet"


def scaling_active(situation: Situation) -> Condition:
    """Compute the condition ScalingActive."""
    decision = situation.decision
    if situation.spec.autoscaling is None:
        return false("ScalingDisabled", DISABLED)
    if decision is None:
        return as_before(SCALING_ACTIVE, situation.observed, UNDECIDED)
    if decision.hold is not None:
        return false(decision.hold.reason, decision.hold.message)
    if situation.spec.is_autoscaled and not decision.replicas:
        return true("Active", "the first replica starts when the gateway holds a request")
    if situation.spec.is_autoscaled:
        return true("Active", "the replicas follow the token demand")
    message = (
        "spec.autoscaling.mode is DryRun: the number of replicas is spec.replicas, and "
        "status.autoscaling.recommendedReplicas follows the token demand"
    )
    return false("DryRun", message)
