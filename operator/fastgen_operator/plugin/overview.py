"""The overview of a FastGenDeployment, from the resource and its pods. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from fastgen_operator.autoscale.supply import StartTimes, supply_of
from fastgen_operator.kinds import Object
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.pod_failures import summary_of
from fastgen_operator.status.conditions.ready import READY
from fastgen_operator.status.reasons import remedy

# The default of spec.startupDeadlineSeconds.
_DEADLINE = 1800.0


@dataclass(frozen=True, slots=True)
class PodRow:
    """An engine pod. States: those of `status.supply`, Straggler (ready but slow), Ended."""

    name: str
    state: str
    node: str
    created: str
    restarts: int
    message: str


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a fleet in forward tokens per second; None where unknown.

    Attributes:
        capacity: capacity of one replica within the latency targets.
        ready: number of ready pods.
    """

    demand: float | None
    capacity: float | None
    ready: int

    @property
    def utilization(self) -> float | None:
        """The demand as a share of the capacity of the ready pods."""
        if self.demand is None or not self.capacity or not self.ready:
            return None
        return self.demand / (self.capacity * self.ready)


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that requires action, or a status of an earlier spec, and what to do.

    Attributes:
        type: types of the conditions, separated by commas; Status for a status of an earlier spec.
    """

    type: str
    reason: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Overview:
    """One FastGenDeployment on one screen.

    Attributes:
        ready, reason: status and reason of the condition Ready; Unknown and NoStatus without it.
        is_current: whether the status was computed from the present spec.
        served: `status.model`.
        replicas: desired, present, ready and updated replicas, from the status, and the bounds of the autoscaler.
    """

    namespace: str
    name: str
    ready: str
    reason: str
    is_current: bool
    model: str
    served: dict[str, Any]
    url: str
    created: str
    replicas: dict[str, Any]
    conditions: list[dict[str, Any]]
    pods: list[PodRow]
    supply: dict[str, int]
    load: Load
    autoscaling: dict[str, Any]
    problems: list[Finding]

    @property
    def problem_reasons(self) -> str:
        """The reasons of the problems, each once."""
        return ", ".join(dict.fromkeys(problem.reason for problem in self.problems))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "load": {**asdict(self.load), "utilization": self.load.utilization}}


def overview_of(resource: Object, pods: list[Pod], now: datetime) -> Overview:
    """Return the overview of a resource and its pods. `now` must have a time zone."""
    metadata, spec, status = resource["metadata"], resource["spec"], resource.get("status", {})
    conditions = status.get("conditions", [])
    ready: dict[str, Any] = next((each for each in conditions if each["type"] == READY), {})
    autoscaling = status.get("autoscaling", {})
    supply = {state: count for state, count in status.get("supply", {}).items() if state != "pods"}
    bounds = spec.get("autoscaling")
    is_current = status.get("observedGeneration") == metadata["generation"]
    return Overview(
        namespace=metadata["namespace"],
        name=metadata["name"],
        ready=ready.get("status", "Unknown"),
        reason=ready.get("reason", "NoStatus"),
        is_current=is_current,
        model=spec["model"]["source"],
        served=status.get("model", {}),
        url=status.get("url", ""),
        created=metadata["creationTimestamp"],
        replicas={
            "desired": status.get("desiredReplicas", 0),
            "present": status.get("replicas", 0),
            "ready": status.get("readyReplicas", 0),
            "updated": status.get("updatedReplicas", 0),
            "bounds": None if bounds is None else [bounds.get("minReplicas", 1), bounds["maxReplicas"]],
        },
        conditions=conditions,
        pods=_pods(resource, pods, now),
        supply=supply,
        load=Load(
            autoscaling.get("demandTokensPerSecond"),
            status.get("capacity", {}).get("tokensPerSecond"),
            supply.get("ready", status.get("readyReplicas", 0)),
        ),
        autoscaling=autoscaling,
        problems=_problems(conditions, is_current=is_current),
    )


def _pods(resource: Object, pods: list[Pod], now: datetime) -> list[PodRow]:
    """Return the pods with their states, by the operator's own rules.

    The operator also knows the Events of pods, and starts of pods that are gone. So what the status says about a pod
    that does not serve takes precedence, unless the pod has since become ready, ended or lost its node, or is being
    deleted.
    """
    told = {each["name"]: each for each in resource.get("status", {}).get("supply", {}).get("pods", ())}
    slow = resource.get("status", {}).get("stragglers", ())
    deadline = float(resource["spec"].get("startupDeadlineSeconds", _DEADLINE))
    starts = StartTimes().learn(pods, deadline)
    found = []
    for pod in pods:
        known = supply_of(pod, summary_of(pod), starts, deadline, now.timestamp())
        state, message = str(known.state), known.message
        if pod.has_ended:
            state, message = "Ended", pod.reason or pod.phase
        elif state == "Ready" and pod.name in slow:
            state, message = "Straggler", "much slower than the other replicas"
        elif state in ("Starting", "Failing", "Unschedulable") and pod.name in told:
            state, message = told[pod.name]["state"], told[pod.name]["message"]
        restarts = sum(each.restarts for each in pod.containers if each.role in ("engine", "container"))
        found.append(PodRow(pod.name, state, pod.node or "-", pod.created, restarts, message))
    return found


def _problems(conditions: list[dict[str, Any]], *, is_current: bool) -> list[Finding]:
    """Return the conditions that require action, except Ready, which repeats another one.

    One cause often sets several conditions, for example ModelCached and Progressing. They are one finding.
    """
    found: dict[tuple[str, str], Finding] = {}
    if not is_current:
        message = "the operator has not handled the present spec yet"
        page = 'See "The operator itself" in docs/operations.md.'
        found["Outdated", message] = Finding("Status", "Outdated", message, page)
    for each in conditions:
        kind, reason, message = each["type"], each["reason"], each["message"]
        action = remedy(kind, reason, each["status"])
        if kind != READY and action:
            first = found.get((reason, message))
            known = Finding(kind, reason, message, action)
            found[reason, message] = known if first is None else replace(first, type=f"{first.type}, {kind}")
    return list(found.values())
