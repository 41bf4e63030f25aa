"""What a rollout and a scale-down need beyond the Deployment controller: room for the new pods, and an order. Pure."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.kinds import Object
from fastgen_operator.plan.observed import Observed, current_pods, is_controlled_by, is_rollout_observed, older_pods
from fastgen_operator.pods import (
    has_ended,
    has_started,
    is_ready,
    is_terminating,
    name_of,
    node_of,
    unschedulable_message,
)

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""The ReplicaSet controller deletes the pod with the lowest of these first, among those that are ready and run."""

_HIGHEST_COST: Final = 2**31 - 1


def with_room(spec: Spec, observed: Observed) -> Spec:
    """The spec, with a higher `rollout.maxUnavailable` while the rollout could never go on without it.

    Where a node is short of GPUs, the Deployment controller may delete an old pod that waits for one instead of an old
    pod that holds one and only crashes: the new pod then waits for that GPU, and the controller for the new pod. Pods
    that are not ready are no loss, so that number may be unavailable; those that are ready stay as many as they are.
    """
    asked = spec.rollout.max_unavailable
    allowed = _max_unavailable(asked, observed.desired_replicas, observed)
    if allowed == asked:
        return spec
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"max_unavailable": allowed})})


def _max_unavailable(asked: int, wanted: int, observed: Observed) -> int:
    deployment = observed.deployment
    if deployment is None or not is_controlled_by(deployment, observed.resource):
        return asked
    if not is_rollout_observed(deployment):
        # Whether it is stuck is not known now: what was given is not taken back before it could work.
        return max(asked, _live_max_unavailable(deployment, asked))
    idle = [pod for pod in older_pods(observed) if node_of(pod) and not is_ready(pod) and not has_started(pod)]
    waiting = [pod for pod in current_pods(observed) if unschedulable_message(pod) is not None]
    if not idle or not waiting:
        return asked
    ready = sum(is_ready(pod) for pod in (*current_pods(observed), *older_pods(observed)))
    return max(asked, wanted - ready)


def _live_max_unavailable(deployment: Object, asked: int) -> int:
    live = deployment["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable", asked)
    return live if isinstance(live, int) else asked


def pods_with_deletion_cost(observed: Observed) -> tuple[Object, ...]:
    """The pods among which their load decides who goes first; the others go before them anyway, or have gone."""
    pods = [pod for pod in observed.pods if is_ready(pod) and not is_terminating(pod) and not has_ended(pod)]
    return tuple(sorted(pods, key=name_of)) if len(pods) > 1 else ()


def deletion_costs(observed: Observed) -> tuple[tuple[Object, str], ...]:
    """The pods whose deletion cost is to be written, with it: the tokens in flight, so that the fewest are disturbed.

    A pod that did not say counts as the busiest that did: it may be too busy to answer.
    """
    loads = observed.in_flight_tokens
    if not loads:
        return ()
    unknown = max(loads.values())
    costs = [
        (pod, str(min(_HIGHEST_COST, round(loads.get(name_of(pod), unknown)))))
        for pod in pods_with_deletion_cost(observed)
    ]
    return tuple((pod, cost) for pod, cost in costs if _written_cost(pod) != cost)


def _written_cost(pod: Object) -> str:
    return str(pod["metadata"].get("annotations", {}).get(DELETION_COST, "0"))
