"""Progressing."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.conditions.condition import Condition, not_observed
from fastgen_operator.pods import failure_of
from fastgen_operator.world import World, current_pods, is_rollout_observed

PROGRESSING: Final = "Progressing"
"""Whether the children are, or are on the way to be, as the spec says. From the operator's own writes, the Deployment
and the pods' containers. True: RollingOut, RolloutComplete. False: InvalidSpec, NameTaken, ApplyRefused (with the API
server's words), BadConfiguration (the engine's last line; exit code 2), CrashLoopBackOff, ImagePullBackOff,
ContainerNotCreated, ReplicaFailure (pods refused, by quota or admission), ProgressDeadlineExceeded.
Unknown: NotObserved (the Deployment controller has not yet seen the newest spec)."""


def progressing(spec: Spec, world: World) -> Condition:
    """See `PROGRESSING`; what stands in the way of the operator's own writes is said by `table` in its place."""
    del spec
    deployment = world.deployment
    if deployment is None or not is_rollout_observed(deployment):
        return not_observed(PROGRESSING)
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
