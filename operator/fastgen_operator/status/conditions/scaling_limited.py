"""ScalingLimited."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition, as_before

SCALING_LIMITED: Final = "ScalingLimited"
"""Whether something keeps the fleet from the size that its load asks for. From the autoscaler's last decision; left out
without spec.autoscaling.
True: TooManyReplicas (maxReplicas; true until the load of a whole scale-down window fits), TooFewReplicas
(minReplicas), RateLimited (growth goes on within seconds). False: WithinBounds.
Unknown: NotObserved (nothing was decided yet). As it was, until the first decision after an operator's start."""


def scaling_limited(spec: Spec, observed: Observed) -> Condition | None:
    """See `SCALING_LIMITED`."""
    if spec.autoscaling is None:
        return None
    decision = observed.decision
    if decision is None:
        return as_before(SCALING_LIMITED, observed, "the autoscaler has not looked at the replicas yet")
    if decision.limit is not None:
        return Condition(SCALING_LIMITED, "True", decision.limit.reason, decision.limit.message)
    return Condition(SCALING_LIMITED, "False", "WithinBounds", "the load alone decides")
