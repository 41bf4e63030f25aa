"""Compute `status.autoscaling`, `status.capacity` and `status.supply`. Pure, and stable while nothing changes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final, get_args

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.decision import Sizing, counted
from fastgen_operator.autoscale.supply import PodState
from fastgen_operator.plan.observed import Observed

# Number of scaling steps kept in the status.
_HISTORY: Final = 5
# Relative change of the capacity from which it is updated: the step-time fit changes a little with every step.
_MOVED: Final = 0.2
# Pods listed in the status, and the length of their messages.
_LISTED: Final = 10
_MESSAGE_LIMIT: Final = 256
_WORST_FIRST: Final = ("Failing", "Lost", "Unschedulable", "Starting", "Draining")


def autoscaling_status(spec: Spec, observed: Observed, now: str) -> dict[str, Any] | None:
    """Compute `status.autoscaling`: the desired replicas, why, and the last changes; None without autoscaling.

    The message is about now. It is kept while the replicas are the same and the demand is about the same. Changes are
    detected by comparison with the current status, so an operator restart loses no history and writes nothing. `now`
    is an RFC 3339 time.
    """
    if spec.autoscaling is None:
        return None
    old: dict[str, Any] = observed.resource.get("status", {}).get("autoscaling", {})
    wanted = observed.desired_replicas
    before = old.get("desiredReplicas")
    if before == wanted or before is None:
        return {**old, "desiredReplicas": wanted, **_told(observed, old)}
    reason, cause = _why(spec, observed, wanted)
    sizing = None if observed.decision is None else observed.decision.sizing
    message = cause if sizing is None else f"{cause}; {_arithmetic(sizing)}"
    step = {"time": now, "fromReplicas": before, "toReplicas": wanted, "reason": reason, "message": message}
    return {
        "desiredReplicas": wanted,
        "lastScaleTime": now,
        "reason": reason,
        "message": f"{counted(wanted)}: {message}",
        **({} if sizing is None else {"demandTokensPerSecond": _rounded(sizing.demand)}),
        "history": [step, *old.get("history", ())][:_HISTORY],
    }


def _told(observed: Observed, old: dict[str, Any]) -> dict[str, Any]:
    """Return the message and the demand of an unchanged number of replicas, if they have to be told again."""
    decision, wanted = observed.decision, observed.desired_replicas
    if decision is None or decision.sizing is None or not decision.sizing.differs(old.get("demandTokensPerSecond")):
        return {}
    sizing = decision.sizing
    more = wanted > math.ceil(sizing.required + sizing.missing)
    kept = "; more are kept for the backlog, the KV cache, the scale-down window or minReplicas" if more else ""
    message = f"{counted(wanted)}: {_arithmetic(sizing)}{kept}"
    return {"message": message, "demandTokensPerSecond": _rounded(sizing.demand)}


def _arithmetic(sizing: Sizing) -> str:
    """Say in one sentence how the number of replicas follows from the demand."""
    demand, capacity = _rounded(sizing.demand), _rounded(sizing.capacity)
    missing = f", and {sizing.missing:.1f} for those that do not serve" if sizing.missing else ""
    return (
        f"{demand:,} tokens/s arrive, and a replica computes {capacity:,} within its latency targets, of which "
        f"{100 * sizing.utilization:.0f} % are to be used: {sizing.required:.1f} replicas{missing}"
    )


def capacity_status(observed: Observed) -> dict[str, Any] | None:
    """Compute `status.capacity`, rounded; None if it is unknown."""
    old: dict[str, Any] | None = observed.resource.get("status", {}).get("capacity")
    found = None if observed.speeds is None else observed.speeds.capacity
    if found is None:
        return old
    new = {
        "tokensPerSecond": _rounded(found.tokens_per_second),
        "tokenBudget": found.token_budget,
        "source": found.source,
    }
    if old is None or old.get("tokenBudget") != new["tokenBudget"]:
        return new
    known = old.get("tokensPerSecond", 0)
    return old if abs(found.tokens_per_second - known) <= _MOVED * known else new


def supply_status(observed: Observed) -> dict[str, Any]:
    """Compute `status.supply`: the number of pods in each state, and the pods that do not serve, worst first."""
    counts = Counter(pod.state for pod in observed.supply)
    others = [pod for pod in observed.supply if pod.state != "Ready"]
    others.sort(key=lambda pod: (_WORST_FIRST.index(pod.state), pod.pod))
    return {
        **{state.lower(): counts[state] for state in get_args(PodState)},
        "pods": [
            {"name": pod.pod, "state": pod.state, "message": pod.message[:_MESSAGE_LIMIT]} for pod in others[:_LISTED]
        ],
    }


def _why(spec: Spec, observed: Observed, wanted: int) -> tuple[str, str]:
    decision = observed.decision
    if decision is not None and decision.replicas == wanted and decision.change is not None:
        return decision.change.reason, decision.change.message
    assert spec.autoscaling is not None
    bounds = f"{spec.autoscaling.min_replicas} to {spec.autoscaling.max_replicas}"
    return "BoundsChanged", f"spec.autoscaling now allows {bounds} replicas"


def _rounded(number: float) -> int:
    """Round to two significant digits."""
    if number < 1:
        return round(number)
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return int(round(number / unit) * unit)
