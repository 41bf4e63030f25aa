"""The pods of a canary, and the pod template that waits for its end. Pure.

While a new revision is tried, and after its rollback, the Deployment keeps its pod template; the rest of it, such as
its replicas, follows the spec. What is done follows from the state that is stored in the status: before the pods of a
revision that is rolled back are deleted, the gateway can read there that they get no share any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from fastgen_operator.api.rollout import CanaryRollout
from fastgen_operator.canary.canary import Canary, Trial, next_canary, num_pods
from fastgen_operator.children.canary import CanaryPods
from fastgen_operator.kinds import Object
from fastgen_operator.objects.container import ENGINE_CONTAINER
from fastgen_operator.objects.deployment import Deployment
from fastgen_operator.objects.pod import Pod
from fastgen_operator.objects.stored import fingerprint
from fastgen_operator.plan.pod_failures import state_of
from fastgen_operator.plan.situation import Situation


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """What can be applied now.

    Attributes:
        template: the pod template of the Deployment; None for no Deployment yet.
        held_revision: the revision of `template` if it is not the spec's; else empty.
        pods: those of the canary, if it has any.
        state: the next state, for the status; None if there is no canary.
        lacks_gateway: whether a new revision waits because there is no gateway.
    """

    template: Object | None
    held_revision: str = ""
    pods: CanaryPods | None = None
    state: Canary | None = None
    lacks_gateway: bool = False


def plan_canary(template: Object | None, wanted: Object | None, situation: Situation) -> CanaryPlan:
    """Return the canary that the spec needs now, and the pod template of the Deployment until it is over.

    Args:
        template: the pod template that the Deployment gets without a canary: the spec's, or the live one while the
            spec's model is downloaded.
        wanted: the pod template of the spec; None if it cannot be used.
    """
    observed, before = situation.observed, situation.canary_before
    rollout, live = situation.spec.rollout.canary, observed.deployment
    if rollout is None or live is None or not observed.owns(live.obj) or not live.revision:
        return CanaryPlan(template)
    if wanted is None or template is not wanted:
        # A rollback is remembered.
        return CanaryPlan(template, live.revision, state=None if before is None or before.has_pods else before)
    revision = fingerprint(wanted)
    state = next_canary(before, _trial(wanted, revision, live, situation), situation.now)
    present = before if before is not None and before.revision == revision else None
    pods = None
    if state is not None and present is not None and present.has_pods:
        pods = CanaryPods(wanted, revision, _num_pods(rollout, present, situation))
    if revision == live.revision or state is None or (present is not None and present.outcome == "Promoted"):
        return CanaryPlan(wanted, pods=pods, state=state)
    held = live.template
    if state.outcome is None and not situation.has_gateway:
        return CanaryPlan(held, live.revision, pods, present, lacks_gateway=True)
    return CanaryPlan(held, live.revision, pods, state)


def _trial(wanted: Object, revision: str, live: Deployment, situation: Situation) -> Trial:
    """Return what is known about the new revision, with the pod template `wanted`, and that of the live Deployment."""
    observed, before = situation.observed, situation.canary_before
    pods = observed.current_canary_pods(revision)
    waiting = next((pod for pod in pods if not pod.is_ready), None)
    return Trial(
        rollout=situation.spec.rollout.canary,
        wanted=revision,
        stable=live.revision,
        is_rolled_out=observed.is_rolled_out,
        can_start=situation.desired_replicas > 0
        and any(pod.is_ready for pod in situation.pods)
        and _served_name(live.template) == _served_name(wanted),
        replicas=situation.desired_replicas,
        ready=sum(pod.is_ready for pod in pods),
        unready="" if waiting is None else state_of(waiting, situation.failures),
        crash="" if before is None else _first_crash(before, pods),
        evidence=situation.evidence,
        deadline=timedelta(seconds=situation.spec.rollout.progress_deadline_seconds),
    )


def _served_name(template: Object) -> str | None:
    """Return the name in the requests that the pods of a template accept; None if it has none."""
    containers = (each for each in template["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    words: list[str] = next((each.get("args", []) for each in containers), [])
    return next((value for flag, value in pairwise(words) if flag == "--served-model-name"), None)


def _first_crash(canary: Canary, pods: Sequence[Pod]) -> str:
    """Say how the engine of the first pod that crashed while it served ended; empty if none did.

    The pods that a later step adds may fail to start, as those of the first step may: the deadline bounds their time.
    """
    since = canary.serves_since
    if since is None:
        return ""
    starts = canary.measured_since is None
    serving = (pod for pod in pods if not starts or not pod.created or datetime.fromisoformat(pod.created) < since)
    return next((words for pod in serving if (words := _crash(pod, since))), "")


def _crash(pod: Pod, since: datetime) -> str:
    """Say how the engine of a pod ended since a time; empty if it did not."""
    ended = pod.engine.ended
    if ended is None or not ended.finished or datetime.fromisoformat(ended.finished) < since:
        return ""
    code = "" if ended.exit_code is None else f" with exit code {ended.exit_code}"
    words = f"the engine of pod {pod.name} ended{code} ({ended.reason})"
    return f"{words}: {ended.last_line}" if ended.last_line else words


def _num_pods(rollout: CanaryRollout, canary: Canary, situation: Situation) -> int:
    step = rollout.steps[min(canary.step, len(rollout.steps) - 1)]
    return num_pods(situation.desired_replicas, step.percent)
