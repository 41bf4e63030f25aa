"""Computes the writes that make a resource's children match its spec. Pure functions, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pydantic import ValidationError

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.rules.schedules import faults
from fastgen_operator.canary.canary import Canary
from fastgen_operator.children import build_children
from fastgen_operator.children.desired import Desired, queue_labels
from fastgen_operator.children.platform import Platform
from fastgen_operator.children.template import TemplateRefused, build_template
from fastgen_operator.kinds import (
    CLAIM,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    INFERENCE_POOL,
    JOB,
    OPTIONAL_KINDS,
    POD,
    SERVICE,
    Kind,
    Object,
)
from fastgen_operator.labels_and_annotations import PICKER_SUFFIX
from fastgen_operator.objects.pod import Pod
from fastgen_operator.objects.stored import FAULT, is_terminating, name_of
from fastgen_operator.plan.adoption import Adopt, adoptions, is_left_behind
from fastgen_operator.plan.broken_gpus import pods_with_broken_gpus
from fastgen_operator.plan.canary import plan_canary
from fastgen_operator.plan.changes import Apply, apply_of, removes_pods
from fastgen_operator.plan.model_cache import EndJob, claims_of, finished_downloads, plan_download
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.rewritten_fields import rewritten_fields
from fastgen_operator.plan.rollout import max_unavailable, pods_to_replace
from fastgen_operator.plan.situation import Situation
from fastgen_operator.scale_down.order import SetDeletionCost, deletion_costs, pods_in_order


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that keeps the children from matching the spec: reason and message of a condition."""

    reason: str
    message: str


_NO_GATEWAY: Final = Problem(
    "CanaryWithoutGateway",
    "spec.rollout.canary: only a gateway sends a share of the requests to a new revision, and the operator has none: "
    "install its chart with gateway.enabled, or remove spec.rollout.canary; the pods stay unchanged",
)


@dataclass(frozen=True, slots=True)
class Delete:
    """One child, or one pod to replace, to delete if it is unchanged, and the reason."""

    kind: Kind
    child: Object
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Writes in order, the problem that prevents others, and missing information. Empty in the steady state.

    Attributes:
        rewritten: fields of the Deployment that admission changes in every write. Writing again would not help.
        names_to_look_up: children that the plan creates. The cache has only labelled objects, so another object
            may have the name.
        loads_to_read: pods to read the tokens in flight from, as the applies may remove some of them.
        needs_nodes: whether the download waits until the nodes are read.
        canary: the next state of the canary, for the status; None if there is none.
        adopts: children to adopt first. The plan has nothing else then: it has to be made again.
    """

    deletion_costs: tuple[SetDeletionCost, ...] = ()
    applies: tuple[Apply, ...] = ()
    ends: tuple[EndJob, ...] = ()
    deletes: tuple[Delete, ...] = ()
    problem: Problem | None = None
    rewritten: tuple[str, ...] = ()
    names_to_look_up: tuple[tuple[Kind, str], ...] = ()
    loads_to_read: tuple[Pod, ...] = ()
    needs_nodes: bool = False
    canary: Canary | None = None
    adopts: tuple[Adopt, ...] = ()

    @property
    def writes_nothing(self) -> bool:
        """Whether the children are as they should be, apart from what admission rewrites."""
        return replace(self, rewritten=(), canary=None) == Plan()


def parse_spec(resource: Object) -> Spec | Problem:
    """Return the typed spec, or a problem if it is invalid: then CRD and operator are of different versions."""
    try:
        return Spec.model_validate(resource.get("spec", {}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["spec", *(str(part) for part in first["loc"])])
        return Problem("InvalidSpec", f"{field}: {first['msg']}: apply the CRD that belongs to this operator")


def find_fault(observed: Observed) -> Problem | None:
    """Return why the resource or one of its children cannot be used; None if all can.

    It is nested too deeply, too large, or has an unexpected value: see `kube/compact.py`.
    """
    if (fault := observed.resource.get(FAULT)) is not None:
        return Problem("InvalidSpec", f"{fault}; the pods stay unchanged until then")
    for (kind, name), child in observed.children.items():
        if FAULT in child and observed.owns(child):
            words = f"the {kind.name} {name} cannot be read: {child[FAULT]}, or delete the {kind.name}"
            return Problem("UnreadableChild", words)
    return None


def combine(problems: Sequence[Problem]) -> Problem | None:
    """Return one problem with the reason of the first and the messages of all; None if there are none."""
    if not problems:
        return None
    return Problem(problems[0].reason, "; ".join(dict.fromkeys(problem.message for problem in problems)))


def make_plan(situation: Situation, platform: Platform) -> Plan:
    """Compare the children that the spec needs with those observed.

    An object of another owner under a child's name is never taken over. It is a problem, except one of an optional
    kind, which serves in the child's place. A problem of one child does not hold back the others, with one exception:
    if a name is taken while the resource has no Deployment, nothing is written.
    """
    observed, desired = situation.observed, desired_state(situation, platform)
    problems: list[Problem] = []
    template = None
    try:
        template = build_template(desired)
    except TemplateRefused as refusal:
        problems.append(Problem("PodTemplateRefused", f"{refusal}; the pods stay unchanged"))
    download = plan_download(desired, template, situation)
    canary = plan_canary(download.template, template, situation)
    if canary.lacks_gateway:
        problems.append(_NO_GATEWAY)
    children = build_children(desired, canary.template, download.job, canary.pods, canary.held_revision)
    wanted = {(kind, name_of(manifest)) for kind, manifest in children}
    if adopts := adoptions(observed, wanted, desired):
        return Plan(adopts=adopts, canary=situation.canary_before)
    compared = [(kind, manifest, observed.child(kind, name_of(manifest))) for kind, manifest in children]
    own = [(kind, manifest, live) for kind, manifest, live in compared if live is None or observed.owns(live)]
    others = [(kind, live) for kind, _, live in compared if live is not None and not observed.owns(live)]
    if any(kind == SERVICE and name_of(live).endswith(PICKER_SUFFIX) for kind, live in others):
        # Its endpoints are not to be changed, and it is not the pool's picker.
        own = [child for child in own if child[0] not in (ENDPOINT_SLICE, INFERENCE_POOL)]
    taken = [_name_taken(kind, live, observed) for kind, live in others if kind not in OPTIONAL_KINDS]
    problems += taken
    problems += [Problem("InvalidSchedule", fault) for fault in faults(situation.spec.autoscaling)]
    if taken and (observed.deployment is None or not observed.owns(observed.deployment.obj)):
        # Nothing serves yet: create nothing that would depend on another owner's objects.
        return Plan(problem=combine(problems), canary=canary.state)
    applies = tuple(apply for child in own if (apply := apply_of(*child)) is not None)
    removes = any(
        (apply.kind, apply.name) == (DEPLOYMENT, desired.name) and removes_pods(apply, observed.child(DEPLOYMENT))
        for apply in applies
    )
    unknown = tuple((each.kind, each.name) for each in applies if observed.child(each.kind, each.name) is None)
    # A Deployment that the cache does not hold may exist without its label, with pods to remove.
    needs_loads = not situation.in_flight_tokens and (removes or (DEPLOYMENT, desired.name) in unknown)
    loads_to_read = pods_in_order(observed.pods) if needs_loads else ()
    costs = deletion_costs(observed.pods, situation.in_flight_tokens) if removes else ()
    keep = {(kind, name_of(manifest)) for kind, manifest, _ in own} | {(JOB, name) for name in download.kept_jobs}
    if canary.template is not None:
        # A pod template that is held may need the volume of the previous spec.
        keep |= {(CLAIM, name) for name in claims_of(canary.template)}
    return Plan(
        deletion_costs=costs,
        applies=applies,
        ends=finished_downloads(observed),
        deletes=(*_unwanted(keep, observed), *_replaced_pods(situation)),
        problem=combine(problems),
        rewritten=() if any(apply.kind == DEPLOYMENT for apply in applies) else _rewritten(own),
        names_to_look_up=unknown,
        loads_to_read=loads_to_read,
        needs_nodes=download.needs_nodes,
        canary=canary.state,
    )


def desired_state(situation: Situation, platform: Platform) -> Desired:
    """Return what the children must be like now."""
    resource, spec = situation.observed.resource, situation.spec
    metadata = resource["metadata"]
    return Desired(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        platform=platform,
        replicas=situation.desired_replicas,
        max_unavailable=max_unavailable(situation),
        claim_size=situation.claim_size,
        cached_model=situation.cached_model,
        queue=queue_labels(resource, spec),
    )


def _rewritten(compared: Sequence[tuple[Kind, Object, Object | None]]) -> tuple[str, ...]:
    """Return the fields of the Deployment that admission rewrites; its manifest is what was applied last."""
    for kind, manifest, live in compared:
        if kind == DEPLOYMENT and live is not None:
            return rewritten_fields(manifest, live)
    return ()


def _unwanted(keep: Collection[tuple[Kind, str]], observed: Observed) -> tuple[Delete, ...]:
    """Return deletions of the other children of this resource."""
    return tuple(
        Delete(kind, child, "deleted: the spec no longer needs it")
        for (kind, name), child in observed.children.items()
        if (kind, name) not in keep and observed.owns(child) and not is_terminating(child)
    )


def _replaced_pods(situation: Situation) -> tuple[Delete, ...]:
    waited = "replaced: it waited for a node that the volume has left"
    found = (
        *((pod, waited) for pod in pods_to_replace(situation)),
        *((pod, f"replaced: {failure}") for pod, failure in pods_with_broken_gpus(situation)),
    )
    return tuple(Delete(POD, pod.obj, why) for pod, why in found)


def _name_taken(kind: Kind, live: Object, observed: Observed) -> Problem:
    name = name_of(live)
    if is_left_behind(live, observed.resource):
        words = (
            f"the {kind.name} {name} of an earlier FastGenDeployment of that name has not been deleted yet: wait, or "
            "check its finalizers"
        )
        return Problem("NameTaken", words)
    return Problem(
        "NameTaken",
        f"a {kind.name} named {name} exists and does not belong to this FastGenDeployment: delete that {kind.name}, "
        "or create the FastGenDeployment under another name",
    )
