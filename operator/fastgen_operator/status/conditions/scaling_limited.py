"""The condition ScalingLimited: whether a limit overrides the replicas that the load requires.

Limits are the bounds, the rate limits, and the node of a ReadWriteOnce volume. Source: the autoscaler's last decision.
TooManyReplicas stays True until the load of a full scale-down window fits. After an operator restart, the previous
condition is kept until the first decision.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, as_before, false, true
from fastgen_operator.status.conditions.scaling_active import DISABLED, UNDECIDED

SCALING_LIMITED: Final = "ScalingLimited"


def scaling_limited(situation: Situation) -> Condition:
    """Compute the condition ScalingLimited."""
    decision = situation.decision
    if situation.spec.autoscaling is None:
        return false("ScalingDisabled", DISABLED)
    if decision is None:
        return as_before(SCALING_LIMITED, situation.observed, UNDECIDED)
    if decision.limit is None:
        return false("WithinBounds", "the desired replicas are within the bounds")
    return true(decision.limit.reason, decision.limit.message)
