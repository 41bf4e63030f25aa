"""The condition HeadroomReserved: whether the placeholder pods hold room for further replicas.

Sources: the Deployment of the placeholders, and whether the operator has a PriorityClass for them. It is omitted unless
spec.autoscaling.nodeHeadroom is set.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.autoscale.decision import counted
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, false, not_observed, true

HEADROOM_RESERVED: Final = "HeadroomReserved"


def headroom_reserved(situation: Situation) -> Condition | None:
    """Compute the condition HeadroomReserved; None if the spec does not ask for placeholders."""
    spec, deployment = situation.spec, situation.observed.headroom
    if spec.autoscaling is None or not spec.autoscaling.node_headroom:
        return None
    if not situation.has_headroom_class:
        words = "the operator has no PriorityClass for placeholder pods: install its chart with headroom.enabled"
        return false("NoPriorityClass", words)
    wanted = spec.num_placeholders(situation.desired_replicas)
    if not wanted:
        return true("Reserved", f"none is needed: spec.autoscaling.maxReplicas is {spec.autoscaling.max_replicas}")
    if deployment is None or not deployment.is_observed or deployment.replicas != wanted:
        return not_observed(situation)
    refused = deployment.condition("ReplicaFailure")
    if refused.get("status") == "True":
        why = refused.get("message", "no reason given")
        return false("PlaceholdersRejected", f"the API server rejects placeholder pods: {why}")
    running = int(deployment.status.get("availableReplicas", 0))
    number = counted(wanted, "placeholder pod")
    if running < wanted:
        return false("WaitingForNodes", f"{running} of {number} running; the others wait for nodes or the image")
    return true("Reserved", f"{number} running, each with the resources of a replica")
