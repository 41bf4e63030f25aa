"""Compute the parts of the status that follow from measurements. Pure, and stable while nothing changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, get_args

from fastgen_operator.autoscale.decision import Sizing, counted
from fastgen_operator.autoscale.supply import PodState, PodSupply
from fastgen_operator.plan.situation import Situation

# Number of scaling steps kept in the status.
_HISTORY: Final = 5
# Relative change of the capacity from which it is updated: the step-time fit changes a little with every step.
_MOVED: Final = 0.2
# The API server stores no integer above 2^63. An engine may report anything.
_MOST: Final = 10**15
# Pods listed in the status, and the length of their messages.
_LISTED: Final = 10
_MESSAGE_LIMIT: Final = 256
# 3.0000000001 replicas are three.
_TOLERANCE: Final = 1e-6
# How the number of replicas follows from the required fraction, if no bound applies.
_ROUNDED: Final = "rounded up"
_KEPT: Final = "more are kept for the backlog, the KV cache or the limits of scaling down"
_LATER: Final = "more are added once the demand has lasted"
_WORST_FIRST: Final = ("Failing", "Lost", "Unschedulable", "Starting", "Draining")


def autoscaling_status(situation: Situation, now: str) -> dict[str, Any] | None:
    """Compute `status.autoscaling`: the number of replicas, why, and the last changes; None without autoscaling.

    The message is kept while the replicas and their bound are the same and the demand is about the same. Changes are
    detected by comparison with the current status, so an operator restart loses no history and writes nothing.

    Args:
        now: RFC 3339 time.
    """
    spec = situation.spec
    if spec.autoscaling is None:
        return None
    old: dict[str, Any] = situation.observed.resource.get("status", {}).get("autoscaling", {})
    floor, decision = situation.timetable.floor, situation.decision
    schedule = {} if floor is None else {"activeSchedule": floor.to_status()}
    status = _of(old, "lastScaleTime", "history") | schedule | _learning(situation, old)
    if not spec.is_autoscaled:
        if decision is None:
            # After a restart of the operator, the last recommendation stays until there is a new one.
            return status | _of(old, "recommendedReplicas", "reason", "message", "demandTokensPerSecond")
        told = _told(situation, old, old.get("recommendedReplicas"), decision.replicas)
        return status | {"recommendedReplicas": decision.replicas} | told
    before, after = old.get("desiredReplicas"), situation.desired_replicas
    told = _told(situation, old, before, after)
    if before is not None and before != after:
        reason, message = _cause(situation, after)
        if decision is not None and decision.sizing is not None:
            message += f"; {told['message'].partition(': ')[2]}"
        step = {"time": now, "fromReplicas": before, "toReplicas": after, "reason": reason, "message": message}
        status |= {"lastScaleTime": now, "history": [step, *old.get("history", ())][:_HISTORY]}
    return status | {"desiredReplicas": after} | told


def _told(situation: Situation, old: dict[str, Any], before: int | None, after: int) -> dict[str, Any]:
    """Return reason, message and demand for a number of replicas: the old ones, unless something has changed."""
    told = _of(old, "reason", "message", "demandTokensPerSecond")
    decision, bound = situation.decision, _bound(situation, after)
    sizing = None if decision is None else decision.sizing
    changed = before is not None and before != after
    if changed:
        told["reason"], cause = _cause(situation, after)
        told["message"] = f"{counted(after)}: {cause}"
    elif decision is None:
        return told
    if sizing is None:
        if bound:
            told["message"] = f"{counted(after)}: {bound}"
        if bound or not after:
            told.pop("demandTokensPerSecond", None)
        return told
    same_bound = str(told.get("message", "")).endswith((bound,) if bound else (_ROUNDED, _KEPT, _LATER))
    if changed or before is None or not same_bound or sizing.differs(old.get("demandTokensPerSecond")):
        told["message"] = f"{counted(after)}: {_arithmetic(sizing)}; {bound or _rounding(sizing, after)}"
        told["demandTokensPerSecond"] = _rounded(sizing.demand)
    return told


def _learning(situation: Situation, old: dict[str, Any]) -> dict[str, Any]:
    """Return the field `learning`: the last one shown, or the old one after a restart of the operator."""
    bounds = situation.spec.autoscaling
    if bounds is None or bounds.learning == "Disabled" or not situation.min_replicas:
        return {}
    return _of(old, "learning") if situation.learning is None else {"learning": situation.learning.to_status()}


def _of(old: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the named fields that are set."""
    return {name: old[name] for name in names if name in old}


def _arithmetic(sizing: Sizing) -> str:
    """Say how many replicas the demand requires, from the inputs and the target."""
    demand, capacity = _rounded(sizing.demand), _rounded(sizing.capacity)
    missing = f", and {sizing.missing:.1f} for failing pods and stragglers" if sizing.missing else ""
    return (
        f"{demand:,} tokens/s arrive, and a replica computes {capacity:,} within its latency targets, of which "
        f"{100 * sizing.utilization:.0f} % are to be used: {sizing.required:.1f} replicas{missing}"
    )


def _rounding(sizing: Sizing, replicas: int) -> str:
    """Say how the number of replicas follows from what the demand requires, if no bound applies."""
    required = max(1, math.ceil(sizing.required + sizing.missing - _TOLERANCE))
    if replicas > required:
        return _KEPT
    return _ROUNDED if replicas == required else _LATER


def _bound(situation: Situation, replicas: int) -> str:
    """Return what decides the number of replicas instead of the demand; empty if nothing does."""
    decision, floor = situation.decision, situation.timetable.floor
    if floor is not None and replicas == floor.replicas:
        return str(floor)
    if decision is None:
        return ""
    if decision.hold is not None:
        return f"held: {decision.hold.message}"
    return "" if decision.limit is None else decision.limit.message


def capacity_status(situation: Situation) -> dict[str, Any] | None:
    """Compute `status.capacity`, rounded; None before it was known.

    The old value is kept while the new one is unknown or hardly differs.
    """
    old: dict[str, Any] | None = situation.observed.resource.get("status", {}).get("capacity")
    found = None if situation.speeds is None else situation.speeds.capacity
    if found is None:
        return old
    speed, budget = found.tokens_per_second, found.token_budget
    if old is not None and old.get("tokenBudget") == budget:
        known = old.get("tokensPerSecond", 0)
        if abs(speed - known) <= _MOVED * known:
            return old
    return {"tokensPerSecond": _rounded(speed), "tokenBudget": budget, "source": found.source}


def stragglers_status(situation: Situation) -> list[str] | None:
    """Compute `status.stragglers`, sorted by name; None if there are none. It is kept while no speed is known."""
    old: list[str] | None = situation.observed.resource.get("status", {}).get("stragglers")
    speeds = situation.speeds
    if speeds is None or speeds.capacity is None:
        return old
    return sorted(straggler.pod for straggler in speeds.stragglers) or None


def supply_status(supply: Sequence[PodSupply]) -> dict[str, Any]:
    """Compute `status.supply`: the number of pods in each state, and the first ten that are not Ready, worst first."""
    counts = Counter(of.state for of in supply)
    others = [of for of in supply if of.state != "Ready"]
    others.sort(key=lambda of: (_WORST_FIRST.index(of.state), of.pod.name))
    return {
        **{state.lower(): counts[state] for state in get_args(PodState)},
        "pods": [
            {"name": of.pod.name, "state": of.state, "message": of.message[:_MESSAGE_LIMIT]} for of in others[:_LISTED]
        ],
    }


def _cause(situation: Situation, wanted: int) -> tuple[str, str]:
    decision = situation.decision
    if decision is not None and decision.replicas == wanted and decision.change is not None:
        return decision.change.reason, decision.change.message
    floor = situation.timetable.floor
    if floor is not None and wanted == floor.replicas:
        return "ScheduleStarted", str(floor)
    bounds = situation.spec.autoscaling
    assert bounds is not None
    allowed = f"{bounds.min_replicas} to {bounds.max_replicas}"
    return "BoundsChanged", f"spec.autoscaling now allows {allowed} replicas"


def _rounded(number: float) -> int:
    """Round to two significant digits, at most `_MOST`."""
    if number < 1:
        return round(number)
    number = min(number, _MOST)
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return int(round(number / unit) * unit)
