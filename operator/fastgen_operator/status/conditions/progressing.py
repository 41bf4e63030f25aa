"""The condition Progressing: whether the children match the spec or are progressing towards it.

Sources, of which the first that applies counts: the operator's own writes; whether the Deployment controller has
observed the spec; whether the Deployment is paused; the pods of the current template, with their Events or last log
lines; the pod that was replaced last, because its GPU or engine failed, until the new one is ready; the Deployment's
condition ReplicaFailure; the ended pods of the current template; the Deployment's condition Progressing; whether all
pods have the current template. After three restarts of a container, its reason stays for ten minutes after the last
crash, even if the pod is ready in the meantime.
"""

from __future__ import annotations

from typing import Final

from fastgen_operator.kinds import Object
from fastgen_operator.objects.deployment import Deployment
from fastgen_operator.objects.stored import condition_of
from fastgen_operator.plan.broken_gpus import replaced_failure
from fastgen_operator.plan.pod_failures import Failure, failure_of, failure_of_ended
from fastgen_operator.plan.situation import Situation
from fastgen_operator.status.conditions.condition import Condition, false, not_observed, true

PROGRESSING: Final = "Progressing"
IMAGE_VOLUMES_DISABLED: Final = "ImageVolumesDisabled"

# Failures of the operator's own writes.
_REFUSED: Final = (
    *("InvalidSpec", "UnreadableChild", "NameTaken", "PodTemplateRefused", "InvalidSchedule", "ApplyRefused"),
    *("CanaryWithoutGateway", "Contended", "ReconcileFailed", IMAGE_VOLUMES_DISABLED),
)


def progressing(situation: Situation) -> Condition:
    """Compute the condition Progressing, except for failures of the operator's own writes, which `table` adds."""
    observed = situation.observed
    deployment = observed.deployment
    if deployment is None or not deployment.is_observed:
        return not_observed(situation)
    if deployment.is_paused and not observed.is_rolled_out:
        name = observed.key[1]
        words = f"Deployment {name} is paused, so its rollout is stopped: run kubectl rollout resume deployment/{name}"
        return false("DeploymentPaused", words)
    failure = (
        _of_one_pod(situation)
        or replaced_failure(observed)
        or _of_rejected_pods(deployment)
        or failure_of_ended(observed.failed_pods, observed.current_pods, situation.desired_replicas)
        or _of_a_late_rollout(situation, deployment)
    )
    if failure is not None:
        return false(failure.reason, failure.message)
    if (canary := situation.canary) is not None and canary.outcome == "RolledBack":
        return false(canary.reason, f"rolled back: {canary.message}; the pods keep their revision: correct the spec")
    if canary is not None and canary.outcome is None:
        return true("CanaryRunning", canary.message)
    if observed.is_rolled_out:
        return true("RolloutComplete", "all pods have the current template")
    old = deployment.present - deployment.updated
    message = f"{deployment.updated} of {deployment.replicas} pods have the current template, {old} of older ones left"
    return true("RollingOut", message)


def is_refused(resource: Object) -> bool:
    """Return whether the last reconcile of this spec could not write what it wanted to, as the status shows."""
    shown = condition_of(resource.get("status", {}), PROGRESSING)
    is_current = shown.get("observedGeneration") == resource["metadata"].get("generation")
    return is_current and shown.get("status") == "False" and shown.get("reason") in _REFUSED


def _of_one_pod(situation: Situation) -> Failure | None:
    known, pods = situation.failures, situation.observed.current_pods
    each = (failure_of(pod, situation.now) or known.get(pod.name) for pod in pods)
    if not (found := [failure for failure in each if failure is not None]):
        return None
    others = len(found) - 1
    tail = f" ({others} more fail{'s' if others == 1 else ''})" if others else ""
    return Failure(found[0].reason, found[0].message + tail)


def _of_rejected_pods(deployment: Deployment) -> Failure | None:
    refused = deployment.condition("ReplicaFailure")
    if refused.get("status") != "True":
        return None
    return Failure("ReplicaFailure", f"the API server rejects new pods: {refused.get('message', 'no reason given')}")


def _of_a_late_rollout(situation: Situation, deployment: Deployment) -> Failure | None:
    if deployment.condition("Progressing").get("status") != "False":
        return None
    state = situation.unready_state or "no pod of the current template exists"
    seconds = situation.spec.rollout.progress_deadline_seconds
    return Failure("ProgressDeadlineExceeded", f"no progress in {seconds} s; {state}")
