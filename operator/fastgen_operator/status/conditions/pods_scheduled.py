"""The condition PodsScheduled."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.plan.observed import Observed, current_pods, older_pods
from fastgen_operator.pods import is_scheduled, is_terminating, name_of, node_of, unschedulable_message
from fastgen_operator.status.conditions.condition import Condition

PODS_SCHEDULED: Final = "PodsScheduled"
"""Whether the pods of the current template are scheduled. Source: the PodScheduled conditions of the pods.
True: AllScheduled, ScaledToZero. False: InsufficientGPU (the scheduler's message names the GPU resource), Unschedulable
(any other cause). Unknown: NoPods (no pod exists yet), WaitingForScheduler."""


def pods_scheduled(spec: Spec, observed: Observed) -> Condition:
    """Compute the condition PodsScheduled."""
    pods = current_pods(observed)
    if observed.desired_replicas == 0:
        return Condition(PODS_SCHEDULED, "True", "ScaledToZero", "scaled to 0 replicas")
    if not pods:
        return Condition(PODS_SCHEDULED, "Unknown", "NoPods", "no pod of the current template exists yet")
    stuck = [(pod, words) for pod in pods if (words := unschedulable_message(pod)) is not None]
    if stuck:
        gpu = spec.resources.gpu
        short = [(pod, words) for pod, words in stuck if gpu.count > 0 and gpu.resource_name in words]
        pod, words = (short or stuck)[0]
        reason = "InsufficientGPU" if short else "Unschedulable"
        message = f"{len(stuck)} of {len(pods)} pods cannot be scheduled; pod {name_of(pod)}: {words}"
        return Condition(PODS_SCHEDULED, "False", reason, message + _hint(spec, observed))
    waiting = [pod for pod in pods if not is_scheduled(pod)]
    if waiting:
        message = f"{len(waiting)} of {len(pods)} pods not yet handled by the scheduler"
        return Condition(PODS_SCHEDULED, "Unknown", "WaitingForScheduler", message)
    return Condition(PODS_SCHEDULED, "True", "AllScheduled", f"{len(pods)} of {len(pods)} pods scheduled")


def _hint(spec: Spec, observed: Observed) -> str:
    """Return what holds the capacity that the pods wait for, if that is this resource itself."""
    terminating = sorted((pod for pod in observed.pods if is_terminating(pod) and node_of(pod)), key=name_of)
    if terminating:
        pod = terminating[0]
        due = pod["metadata"]["deletionTimestamp"]
        return f"; pod {name_of(pod)} on node {node_of(pod)} still holds its resources: it terminates by {due}"
    if spec.rollout.max_unavailable == 0 and older_pods(observed):
        return (
            "; spec.rollout.maxUnavailable is 0, so the new pod needs room next to the old ones: "
            "set maxSurge to 0 and maxUnavailable to 1 if there is no spare capacity"
        )
    return ""
