"""Deletion costs, by which the ReplicaSet controller chooses the pods that it deletes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fastgen_operator.objects.pod import Pod, by_name

# Annotation of a pod: the ReplicaSet controller deletes the ready pod with the lowest cost first.
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_HIGHEST_COST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SetDeletionCost:
    """A deletion cost to write to one pod."""

    pod: Pod
    cost: str


def pods_in_order(pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods whose cost determines the order of deletion: the ready ones.

    Pods that are being deleted are left out. Empty if only one pod remains.
    """
    ready = [pod for pod in pods if pod.is_ready and not pod.is_terminating and not pod.has_ended]
    return by_name(ready) if len(ready) > 1 else ()


def deletion_costs(pods: Iterable[Pod], loads: Mapping[str, float]) -> tuple[SetDeletionCost, ...]:
    """Return the deletion costs to write: the tokens in flight of pods whose annotation differs.

    A pod whose load is unknown gets the highest cost of the others: it may be too busy to answer.

    Args:
        loads: tokens in flight by pod name; empty while unknown.
    """
    unknown = max(loads.values(), default=0.0)
    costs = [
        SetDeletionCost(pod, str(min(_HIGHEST_COST, round(loads.get(pod.name, unknown)))))
        for pod in pods_in_order(pods)
        if loads
    ]
    return tuple(each for each in costs if str(each.pod.annotations.get(DELETION_COST, "0")) != each.cost)
