"""Additions to the Deployment controller: unblock stuck pods, and order pods for a scale-down. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.children.colocation import VOLUME_ON_ONE_NODE, runs_on_one_node, volume_nodes
from fastgen_operator.kinds import Object
from fastgen_operator.objects import annotations_of, is_controlled_by, is_terminating, name_of
from fastgen_operator.plan.observed import Observed, current_pods, is_rollout_observed, older_pods
from fastgen_operator.pods import has_ended, has_started, is_ready, node_of, pending_message, unschedulable_pods

# Annotation of a pod: the ReplicaSet controller deletes the ready pod with the lowest cost first.
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
_HIGHEST_COST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SetDeletionCost:
    """A deletion cost to write to one pod."""

    pod: Object
    cost: str


def unblock_rollout(spec: Spec, observed: Observed) -> Spec:
    """Return the spec, with a higher `rollout.maxUnavailable` if the rollout is deadlocked without it.

    If GPUs are scarce, the Deployment controller may keep a crashing old pod that holds a GPU: the new pod waits for
    that GPU, and the controller for the new pod. The raised number covers only pods that are not ready, so that no
    ready pod is deleted.
    """
    allowed = _max_unavailable(spec.rollout.max_unavailable, observed)
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"max_unavailable": allowed})})


def _max_unavailable(configured: int, observed: Observed) -> int:
    deployment = observed.deployment
    if deployment is None or not is_controlled_by(deployment, observed.resource):
        return configured
    if not is_rollout_observed(deployment):
        # Until the controller has seen the raised number, keep it.
        live = deployment["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable")
        return max(configured, live) if isinstance(live, int) else configured
    idle = [pod for pod in older_pods(observed) if node_of(pod) and not is_ready(pod) and not has_started(pod)]
    waiting = [pod for pod in current_pods(observed) if pending_message(pod) is not None]
    if not idle or not waiting:
        return configured
    ready = sum(is_ready(pod) for pod in (*current_pods(observed), *older_pods(observed)))
    return max(configured, observed.desired_replicas - ready)


def pods_to_replace(spec: Spec, observed: Observed) -> tuple[Object, ...]:
    """Return the pods that still wait for the node of a volume that has left it, for example in a node drain.

    The scheduler accepts any node for them now, but it tries them again only after five minutes: see
    https://github.com/kubernetes/kubernetes/issues/141354. It tries a new pod at once. Each pod is replaced once: the
    next status does not say any more that pods wait for a node.
    """
    pods = (*observed.pods, *observed.fetch_pods)
    conditions = observed.resource.get("status", {}).get("conditions", ())
    # PodsScheduled or ModelCached. ScalingLimited is True, and is kept by a restarted operator.
    waited = any((each["reason"], each["status"]) == (VOLUME_ON_ONE_NODE, "False") for each in conditions)
    if not waited or not runs_on_one_node(spec) or volume_nodes(spec, pods):
        return ()
    return unschedulable_pods(pods)


def pods_with_deletion_cost(observed: Observed) -> tuple[Object, ...]:
    """Return the pods whose cost determines the order of deletion: all ready ones if there are several."""
    pods = [pod for pod in observed.pods if is_ready(pod) and not is_terminating(pod) and not has_ended(pod)]
    return tuple(sorted(pods, key=name_of)) if len(pods) > 1 else ()


def deletion_costs(observed: Observed) -> tuple[SetDeletionCost, ...]:
    """Return the deletion costs to write, which are the pods' tokens in flight.

    A pod whose load is unknown gets the highest cost of the others: it may be too busy to answer.
    """
    loads = observed.in_flight_tokens
    unknown = max(loads.values(), default=0.0)
    costs = [
        SetDeletionCost(pod, str(min(_HIGHEST_COST, round(loads.get(name_of(pod), unknown)))))
        for pod in pods_with_deletion_cost(observed)
        if loads
    ]
    return tuple(each for each in costs if str(annotations_of(each.pod).get(DELETION_COST, "0")) != each.cost)
