"""Progressing."""

from __future__ import annotations

from typing import Final

from fastgen_operator.api import Spec
from fastgen_operator.kinds import Object
from fastgen_operator.plan.observed import (
    Observed,
    current_pods,
    current_template,
    failed_pods,
    is_paused,
    is_rollout_observed,
)
from fastgen_operator.plan.pod_failures import Failure, failure_of, state_of
from fastgen_operator.pods import is_ready, name_of
from fastgen_operator.status.conditions.condition import Condition, not_observed

PROGRESSING: Final = "Progressing"
"""Whether the children are, or are on the way to be, as the spec says. Set at every visit, from the operator's own
writes, the Deployment and the pods' containers; the first of these that holds.

Unknown: NotObserved (the Deployment controller has not yet seen the newest spec).
False, of the operator's own writes: InvalidSpec (the CRD and the operator are of two versions), NameTaken (a child's
name belongs to somebody else), PodTemplateRefused (spec.podTemplate would leave no engine to serve; the pods stay as
they were), ApplyRefused (with the API server's words), Contended (somebody keeps changing a child).
False, of the rollout: DeploymentPaused (somebody paused the Deployment before it was rolled out).
False, of a pod of the current template, in its own last words: ImagePullBackOff, ContainerNotCreated, OutOfMemory (with
the limit that it had), BadConfiguration (exit code 2), StartupDeadlineExceeded, CrashLoopBackOff; the last stays for
ten minutes after a crash, even while the pod is ready in between.
False, of all pods: PodsFailed (evicted, or refused by their nodes, again and again), ReplicaFailure (the API server
refuses new pods, by quota or admission), ProgressDeadlineExceeded (none of the above, but no progress for
spec.rollout.progressDeadlineSeconds).
True: RollingOut, RolloutComplete."""

# So many records of failed pods are no accident of one node.
FAILED_PODS: Final = 3


def progressing(spec: Spec, observed: Observed) -> Condition:
    """See `PROGRESSING`; what stands in the way of the operator's own writes is said by `table` in its place."""
    deployment = observed.deployment
    if deployment is None or not is_rollout_observed(deployment):
        return not_observed(PROGRESSING)
    if is_paused(deployment) and not _is_complete(deployment, observed):
        name = observed.key[1]
        words = f"Deployment {name} is paused, and nothing is rolled out: kubectl rollout resume deployment/{name}"
        return Condition(PROGRESSING, "False", "DeploymentPaused", words)
    failure = (
        _of_one_pod(observed) or _of_ended_pods(observed) or _of_the_deployment(spec, observed, deployment["status"])
    )
    if failure is not None:
        return Condition(PROGRESSING, "False", failure.reason, failure.message)
    if _is_complete(deployment, observed):
        return Condition(PROGRESSING, "True", "RolloutComplete", "every pod has the current template")
    wanted, updated = deployment["spec"]["replicas"], deployment["status"].get("updatedReplicas", 0)
    old = deployment["status"].get("replicas", 0) - updated
    message = f"{updated} of {wanted} pods made from the current template, {old} of older ones left"
    return Condition(PROGRESSING, "True", "RollingOut", message)


def _of_one_pod(observed: Observed) -> Failure | None:
    found = [failure for pod in current_pods(observed) if (failure := failure_of(pod, observed.at)) is not None]
    if not found:
        return None
    others = len(found) - 1
    tail = f" ({others} more fail{'s' if others == 1 else ''})" if others else ""
    return Failure(found[0].reason, found[0].message + tail)


def _of_ended_pods(observed: Observed) -> Failure | None:
    ended = failed_pods(observed)
    if len(ended) < FAILED_PODS or all(is_ready(pod) for pod in current_pods(observed)):
        return None
    last = max(ended, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), name_of(pod)))
    status = last["status"]
    words = f"{status.get('reason', 'failed')}: {status.get('message', 'the node gave no reason')}"
    return Failure(
        "PodsFailed", f"{len(ended)} pods were evicted or refused by their nodes; pod {name_of(last)}: {words}"
    )


def _of_the_deployment(spec: Spec, observed: Observed, status: Object) -> Failure | None:
    reported = {condition["type"]: condition for condition in status.get("conditions", ())}
    refused, progress = reported.get("ReplicaFailure", {}), reported.get("Progressing", {})
    if refused.get("status") == "True":
        return Failure("ReplicaFailure", f"new pods are refused: {refused.get('message', 'without a reason')}")
    if progress.get("status") != "False":
        return None
    waiting = [pod for pod in current_pods(observed) if not is_ready(pod)]
    state = state_of(waiting[0]) if waiting else "no pod of the current template is made"
    seconds = spec.rollout.progress_deadline_seconds
    return Failure("ProgressDeadlineExceeded", f"no progress in {seconds} s; {state}")


def _is_complete(deployment: Object, observed: Observed) -> bool:
    """Whether every pod there is has the current template, and has been ready once."""
    status = deployment.get("status", {})
    progress = {c["type"]: c for c in status.get("conditions", ())}.get("Progressing", {}).get("reason")
    wanted, updated = deployment["spec"]["replicas"], status.get("updatedReplicas", 0)
    if current_template(observed) is None or not status.get("replicas", 0) == updated == wanted:
        return False
    return progress == "NewReplicaSetAvailable" or is_paused(deployment)
