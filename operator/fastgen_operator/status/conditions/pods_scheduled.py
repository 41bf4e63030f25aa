"""The condition PodsScheduled: whether the pods of the current template are scheduled.

Source: the PodScheduled conditions of the pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fastgen_operator.children.colocation import VOLUME_ON_ONE_NODE
from fastgen_operator.objects.pod import Pod, by_name
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation
from fastgen_operator.quantities import allocatable
from fastgen_operator.status.conditions.condition import Condition, false, true, unknown
from fastgen_operator.status.scheduler_words import NODE_CONFLICT, is_short_of

PODS_SCHEDULED: Final = "PodsScheduled"


def pods_scheduled(situation: Situation) -> Condition:
    """Compute the condition PodsScheduled."""
    observed = situation.observed
    pods = observed.current_pods
    if situation.desired_replicas == 0:
        return true("ScaledToZero", "scaled to 0 replicas")
    if not pods:
        return unknown("NoPods", "no pod of the current template exists yet")
    nodes = situation.volume_nodes((*observed.pods, *observed.fetch_pods))
    stuck = [(pod, words) for pod in pods if (words := pod.unschedulable) is not None]
    if stuck:
        short = pods_short_of_gpus(situation)
        pod, words = (short or stuck)[0]
        reason = VOLUME_ON_ONE_NODE if nodes else "InsufficientGPU" if short else "Unschedulable"
        message = f"{len(stuck)} of {len(pods)} pods cannot be scheduled; pod {pod.name}: {words}"
        return false(reason, message + (_on_best_node(situation) if short else "") + _hint(situation, nodes, words))
    held = [(pod, words) for pod in pods if (words := pod.gate) is not None]
    if held:
        pod, words = held[0]
        message = f"{len(held)} of {len(pods)} pods held back; pod {pod.name}: {words}"
        return false("SchedulingGated", message)
    waiting = [pod for pod in pods if not pod.is_scheduled]
    if waiting:
        message = f"{len(waiting)} of {len(pods)} pods not yet handled by the scheduler"
        return unknown("WaitingForScheduler", message)
    message = f"{len(pods)} of {len(pods)} pods scheduled"
    where = f", all {_on_one_node(observed, nodes)}" if nodes else ""
    return true("AllScheduled", message + where)


def pods_short_of_gpus(situation: Situation) -> list[tuple[Pod, str]]:
    """Return the pods that find no node with enough GPUs, with the scheduler's message.

    The condition then says how many the nodes have.
    """
    if situation.desired_replicas == 0:
        return []
    gpu, pods = situation.spec.resources.gpu, situation.observed.current_pods
    stuck = [(pod, words) for pod in pods if (words := pod.unschedulable) is not None]
    return [(pod, words) for pod, words in stuck if gpu.count > 0 and is_short_of(gpu.resource_name, words)]


def _on_best_node(situation: Situation) -> str:
    """Return how many GPUs the best node has; empty if the nodes are unknown.

    How many are free is not known without the right to list the pods of all namespaces, which hold some.
    """
    gpu = situation.spec.resources.gpu
    needs = f"; a replica needs {gpu.count} {gpu.resource_name}, and "
    if (best := situation.best_node) is not None:
        return f"{needs}the node with the most free has {best.free} of its {best.total}"
    counts = [allocatable(node, gpu.resource_name) for node in situation.nodes or ()]
    if not counts:
        return ""
    most = f"the node with the most has {max(counts)}" if max(counts) else "no node has any"
    in_use = ", some of them in use" if max(counts) >= gpu.count else ""
    return f"{needs}{most}{in_use}"


def _hint(situation: Situation, nodes: Sequence[str], words: str) -> str:
    """Return what of this resource keeps the pods from a node, and the remedy; empty if nothing does."""
    observed, spec = situation.observed, situation.spec
    hint = f"; all replicas must run {_on_one_node(observed, nodes)}" if nodes else ""
    terminating = by_name(pod for pod in observed.pods if pod.is_terminating and pod.node)
    if terminating:
        return f"{hint}; {terminating[0].termination_message(situation.now)}"
    if spec.rollout.max_unavailable == 0 and observed.older_pods:
        return (
            f"{hint}; spec.rollout.maxUnavailable is 0, so the new pod needs room next to the old ones: "
            "set maxSurge to 0 and maxUnavailable to 1 if there is no spare capacity"
        )
    if nodes:
        return (
            f"{hint}: run fewer replicas, or remove spec.cache and add it again with accessMode ReadWriteMany, "
            "so that several nodes share the volume"
        )
    if NODE_CONFLICT in words and spec.cache is not None:
        return (
            f"; the volume {observed.key[1]} was created in the zone or on the node of its first pod: select nodes "
            "that fit the replicas with spec.scheduling.nodeSelector, then remove spec.cache and add it again"
        )
    return ""


def _on_one_node(observed: Observed, nodes: Sequence[str]) -> str:
    place = f"node {nodes[0]}" if len(nodes) == 1 else f"one of the nodes {', '.join(nodes)}"
    return f"on {place}, because the volume {observed.key[1]} is ReadWriteOnce"
