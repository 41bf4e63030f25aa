"""The conditions of a FastGenDeployment. This is their only writer. Pure.

Each is set from the first visit, Unknown if need be, with the generation of the spec that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastgen_operator.api import Spec
from fastgen_operator.plan import Problem
from fastgen_operator.pods import failure_of, is_ready, is_scheduled, name_of, unschedulable_message
from fastgen_operator.world import World, current_pods, is_rollout_observed

READY: Final = "Ready"
"""The summary, for `kubectl wait`. True: every replica of the current template answers. Otherwise its status, reason
and message are those of the first False, else the first Unknown, of the three below, in their order."""

PODS_SCHEDULED: Final = "PodsScheduled"
"""Whether the pods of the current template have nodes. From the pods' own PodScheduled conditions.
True: AllScheduled, ScaledToZero. False: InsufficientGPU (the scheduler's words name the GPU resource), Unschedulable
(any other of its reasons). Unknown: NoPods (none made yet), WaitingForScheduler."""

PROGRESSING: Final = "Progressing"
"""Whether the children are, or are on the way to be, as the spec says. From the operator's own writes, the Deployment
and the pods' containers. True: RollingOut, RolloutComplete. False: InvalidSpec, NameTaken, ApplyRefused (with the API
server's words), BadConfiguration (the engine's last line; exit code 2), CrashLoopBackOff, ImagePullBackOff,
ContainerNotCreated, ReplicaFailure (pods refused, by quota or admission), ProgressDeadlineExceeded.
Unknown: NotObserved (the Deployment controller has not yet seen the newest spec)."""

AVAILABLE: Final = "Available"
"""Whether every wanted replica of the current template passes its readiness probe now. From the pods.
True: AllReplicasReady; ScaledToZero, because what was asked for is there. False: ReplicasNotReady.
Unknown: NotObserved."""

ORDER: Final = (PODS_SCHEDULED, PROGRESSING, AVAILABLE)

# Longer words of others are cut: a condition is read in a terminal.
_MESSAGE_LIMIT: Final = 1000

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, without the times that `merge` adds."""

    type: str
    status: Truth
    reason: str
    message: str


def all_conditions(spec: Spec | None, world: World, problem: Problem | None) -> tuple[Condition, ...]:
    """Ready first, then the three it sums up. `spec` is None where it could not be read: `problem` then says why."""
    if spec is None:
        unread = "the spec could not be read"
        parts = (
            Condition(PODS_SCHEDULED, "Unknown", "NotObserved", unread),
            progressing(world, problem),
            Condition(AVAILABLE, "Unknown", "NotObserved", unread),
        )
    else:
        parts = (pods_scheduled(spec, world), progressing(world, problem), available(spec, world))
    return ready(parts), *parts


def pods_scheduled(spec: Spec, world: World) -> Condition:
    """See `PODS_SCHEDULED`."""
    pods = current_pods(world)
    if spec.replicas == 0:
        return Condition(PODS_SCHEDULED, "True", "ScaledToZero", "no pods are wanted")
    if not pods:
        return Condition(PODS_SCHEDULED, "Unknown", "NoPods", "no pod of the current template exists yet")
    stuck = [(pod, words) for pod in pods if (words := unschedulable_message(pod)) is not None]
    if stuck:
        gpu = spec.resources.gpu
        short = [(pod, words) for pod, words in stuck if gpu.count > 0 and gpu.resource_name in words]
        pod, words = (short or stuck)[0]
        reason = "InsufficientGPU" if short else "Unschedulable"
        message = f"{len(stuck)} of {len(pods)} pods have no node; pod {name_of(pod)}: {words}"
        return Condition(PODS_SCHEDULED, "False", reason, message)
    waiting = [pod for pod in pods if not is_scheduled(pod)]
    if waiting:
        message = f"{len(waiting)} of {len(pods)} pods wait for the scheduler"
        return Condition(PODS_SCHEDULED, "Unknown", "WaitingForScheduler", message)
    return Condition(PODS_SCHEDULED, "True", "AllScheduled", f"{len(pods)} of {len(pods)} pods on nodes")


def progressing(world: World, problem: Problem | None) -> Condition:
    """See `PROGRESSING`."""
    if problem is not None:
        return Condition(PROGRESSING, "False", problem.reason, problem.message)
    deployment = world.deployment
    if deployment is None or not is_rollout_observed(deployment):
        return _not_observed(PROGRESSING)
    for pod in current_pods(world):
        failure = failure_of(pod)
        if failure is not None:
            return Condition(PROGRESSING, "False", failure.reason, failure.message)
    status = deployment["status"]
    reported = {condition["type"]: condition for condition in status.get("conditions", ())}
    refused, progress = reported.get("ReplicaFailure", {}), reported.get("Progressing", {})
    if refused.get("status") == "True":
        return Condition(PROGRESSING, "False", "ReplicaFailure", refused.get("message", "pods cannot be created"))
    if progress.get("status") == "False":
        return Condition(PROGRESSING, "False", "ProgressDeadlineExceeded", progress.get("message", "no progress"))
    wanted, updated = deployment["spec"]["replicas"], status.get("updatedReplicas", 0)
    if progress.get("reason") == "NewReplicaSetAvailable" and status.get("replicas", 0) == updated == wanted:
        return Condition(PROGRESSING, "True", "RolloutComplete", "every pod has the current template")
    old = status.get("replicas", 0) - updated
    message = f"{updated} of {wanted} pods made from the current template, {old} of older ones left"
    return Condition(PROGRESSING, "True", "RollingOut", message)


def available(spec: Spec, world: World) -> Condition:
    """See `AVAILABLE`."""
    if world.deployment is None or not is_rollout_observed(world.deployment):
        return _not_observed(AVAILABLE)
    if spec.replicas == 0:
        return Condition(AVAILABLE, "True", "ScaledToZero", "0 replicas are wanted: nothing is served")
    count = sum(is_ready(pod) for pod in current_pods(world))
    message = f"{count} of {spec.replicas} replicas ready"
    if count >= spec.replicas:
        return Condition(AVAILABLE, "True", "AllReplicasReady", message)
    return Condition(AVAILABLE, "False", "ReplicasNotReady", message)


def ready(parts: Sequence[Condition]) -> Condition:
    """See `READY`."""
    for status in ("False", "Unknown"):
        for part in parts:
            if part.status == status:
                return Condition(READY, part.status, part.reason, part.message)
    last = parts[-1]
    return Condition(READY, "True", last.reason, last.message)


def merge(conditions: Sequence[Condition], old: Sequence[dict[str, Any]], generation: int, now: str) -> list[Any]:
    """The conditions as the status holds them; the transition time is kept where the status did not change.

    `now` is an RFC 3339 time in UTC with whole seconds.
    """
    before = {condition["type"]: condition for condition in old}
    merged = []
    for condition in conditions:
        previous = before.get(condition.type)
        same = previous is not None and previous["status"] == condition.status
        merged.append(
            {
                "type": condition.type,
                "status": condition.status,
                "observedGeneration": generation,
                "reason": condition.reason,
                "message": condition.message[:_MESSAGE_LIMIT],
                "lastTransitionTime": previous["lastTransitionTime"] if same and previous else now,
            }
        )
    return merged


def _not_observed(kind: str) -> Condition:
    return Condition(kind, "Unknown", "NotObserved", "the Deployment controller has not yet seen the newest spec")
