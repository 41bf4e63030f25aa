"""ScalingActive."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed
from fastgen_operator.status.conditions.condition import Condition, as_before

SCALING_ACTIVE: Final = "ScalingActive"
"""Whether the replicas follow the load now. From the autoscaler's last decision. Left out without spec.autoscaling.
True: Active. False, the replicas stay as they are: NoReadyReplicas (there is no load to go by), NoMetrics (no ready
replica gave usable metrics since the operator began to ask), MetricsStale (more than half of them have not for three
scrapes), CapacityUnknown (load, but the engines cannot tell yet how fast they are), HoldAfterRestart (fewer would do,
but the load has not been watched for a whole scale-down window since the operator's start).
Unknown: NotObserved (nothing was decided yet). As it was, until the first decision after an operator's start."""


def scaling_active(spec: Spec, observed: Observed) -> Condition | None:
    """See `SCALING_ACTIVE`."""
    if spec.autoscaling is None:
        return None
    decision = observed.decision
    if decision is None:
        return as_before(SCALING_ACTIVE, observed, "the autoscaler has not looked at the replicas yet")
    if decision.hold is not None:
        return Condition(SCALING_ACTIVE, "False", decision.hold.reason, decision.hold.message)
    return Condition(SCALING_ACTIVE, "True", "Active", "the replicas follow the tokens that arrive and wait")
