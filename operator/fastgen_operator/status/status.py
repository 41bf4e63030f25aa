"""Compute the status of a FastGenDeployment, and the Events for its changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from fastgen_operator.autoscale.decision import counted
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.canary.canary import Canary
from fastgen_operator.children.service import endpoint_url
from fastgen_operator.kinds import Object
from fastgen_operator.objects.stored import condition_of
from fastgen_operator.plan.broken_gpus import last_replacement
from fastgen_operator.plan.observed import Observed, pod_selector
from fastgen_operator.plan.plan import Problem
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.autoscaling import autoscaling_status, capacity_status, stragglers_status, supply_status
from fastgen_operator.status.conditions.condition import MESSAGE_LIMIT, Condition, merge_conditions, shortened
from fastgen_operator.status.conditions.ready import READY
from fastgen_operator.status.conditions.table import all_conditions, unread_conditions


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes Event to record about the resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def build_status(situation: Situation, problem: Problem | None, rewritten: Sequence[str] = ()) -> dict[str, Any]:
    """Build the status. Each time in it changes only with the fact that it dates.

    Args:
        problem: what prevents the operator's own writes.
        rewritten: fields of the Deployment that admission changes in every write.
    """
    time = _written(situation.now)
    parts = {
        "cachedModel": situation.cached_model,
        "model": situation.model_status,
        "supply": supply_status(situation.supply),
        "lastReplacement": last_replacement(situation),
        "canary": _canary_status(situation.canary),
        "autoscaling": autoscaling_status(situation, time),
        "capacity": capacity_status(situation),
        "stragglers": stragglers_status(situation),
    }
    conditions = all_conditions(situation, problem, rewritten)
    return _status(situation.observed, situation.desired_replicas, parts, conditions, time)


def unread_status(observed: Observed, problem: Problem, now: datetime) -> dict[str, Any]:
    """Build the status of a resource whose spec cannot be read, or whose status cannot be computed.

    It keeps the parts that were computed last.
    """
    old = observed.resource.get("status", {})
    names = ("cachedModel", "model", "supply", "lastReplacement", "canary", "autoscaling", "capacity", "stragglers")
    desired = 0 if observed.deployment is None else observed.deployment.replicas or 0
    parts = {name: old.get(name) for name in names}
    return _status(observed, desired, parts, unread_conditions(problem), _written(now))


def _canary_status(canary: Canary | None) -> dict[str, Any] | None:
    return None if canary is None else {**canary.to_status(), "message": shortened(canary.message, MESSAGE_LIMIT)}


def _status(
    observed: Observed, desired: int, parts: Mapping[str, Any], conditions: Mapping[str, Condition], time: str
) -> dict[str, Any]:
    namespace, name = observed.key
    pods, old = observed.current_pods, observed.resource.get("status", {})
    return {
        "observedGeneration": observed.generation,
        "desiredReplicas": desired,
        "replicas": 0 if observed.deployment is None else observed.deployment.present,
        "readyReplicas": sum(pod.is_ready for pod in pods),
        "updatedReplicas": len(pods),
        "selector": pod_selector(name),
        "url": endpoint_url(namespace, name),
        **{name: value for name, value in parts.items() if value is not None},
        "conditions": merge_conditions(conditions, old.get("conditions", ()), observed.generation, time),
    }


def _written(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shows_ready(status: dict[str, Any]) -> bool:
    """Return whether the condition Ready is True."""
    return condition_of(status, READY).get("status") == "True"


def transition_notice(resource: Object, status: dict[str, Any]) -> Notice | None:
    """Return the Event for a change of Ready's status or reason, if any. Unknown is transient and gets none."""
    before, after = condition_of(resource.get("status", {}), READY), condition_of(status, READY)
    same = (before.get("status"), before.get("reason")) == (after["status"], after["reason"])
    if same or after["status"] == "Unknown":
        return None
    passing = after["status"] == "True" or after["reason"] == "ReplicasNotReady"
    return Notice("Normal" if passing else "Warning", after["reason"], after["message"])


def scaling_notice(resource: Object, status: dict[str, Any]) -> Notice | None:
    """Return the Event for a change of the replicas by the autoscaler, or of its recommendation, if any."""
    before, after = resource.get("status", {}).get("autoscaling", {}), status.get("autoscaling", {})
    recommended = after.get("recommendedReplicas")
    if before.get("recommendedReplicas") not in (None, recommended) and recommended is not None:
        words = f"in a dry run, while spec.replicas is {resource['spec']['replicas']}: {after['message']}"
        return Notice("Normal", "ScalingRecommended", words)
    if not after.get("history") or before.get("history") == after["history"]:
        return None
    step = after["history"][0]
    reason = "ScaledUp" if step["toReplicas"] > step["fromReplicas"] else "ScaledDown"
    words = f"from {step['fromReplicas']} to {counted(step['toReplicas'])}: {step['message']}"
    return Notice("Normal", reason, words)


def schedule_notice(resource: Object, status: dict[str, Any]) -> Notice | None:
    """Return the Event if another schedule sets the lower bound, or none does any more; None if nothing changed."""
    if "autoscaling" not in status:
        return None
    before = resource.get("status", {}).get("autoscaling", {}).get("activeSchedule")
    after = status["autoscaling"].get("activeSchedule")
    if after is not None:
        # A schedule that starts again before its end only ends later.
        same = before is not None and before["name"] == after["name"]
        return None if same else Notice("Normal", "ScheduleStarted", str(Floor.from_status(after)))
    if before is None:
        return None
    lowest = resource["spec"]["autoscaling"].get("minReplicas", 1)
    words = f"schedule {before['name']} no longer applies; spec.autoscaling.minReplicas is {lowest}"
    return Notice("Normal", "ScheduleEnded", words)
