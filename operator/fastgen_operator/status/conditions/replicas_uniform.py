"""The condition ReplicasUniform: whether all replicas are about equally fast.

Source: the engines' step times and throughput. A replica becomes a straggler below half of the median capacity, and
remains one below 60 %. After an operator restart, the previous condition is kept until a replica was measured.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, as_before, false, true

REPLICAS_UNIFORM: Final = "ReplicasUniform"
_LISTED: Final = 5


def replicas_uniform(situation: Situation) -> Condition:
    """Compute the condition ReplicasUniform."""
    speeds = situation.speeds
    if speeds is None or speeds.capacity is None:
        return as_before(REPLICAS_UNIFORM, situation.observed, "no replica's speed has been measured yet")
    if not speeds.stragglers:
        return true("NoStragglers", "no replica is much slower than the others")
    # By name: their order by speed fluctuates.
    names = sorted(straggler.pod for straggler in speeds.stragglers)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    message = (
        f"much slower than the other replicas: pod {', '.join(names[:_LISTED])}{more}; check its GPU and node for "
        "throttling, errors or other load, then delete the pod"
    )
    return false("Stragglers", message)
