"""Computes the writes that make a resource's children match its spec. Pure functions, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from fastgen_operator.api import Spec
from fastgen_operator.autoscale.decision import counted
from fastgen_operator.autoscale.rules.schedules import faults
from fastgen_operator.children import Platform, build_children
from fastgen_operator.children.template import TemplateRefused
from fastgen_operator.kinds import APPLIED_ANNOTATION, DEPLOYMENT, JOB, OPTIONAL_KINDS, POD, Kind, Object
from fastgen_operator.objects import applied_fingerprint, fingerprint, foreign_managers, template_digest
from fastgen_operator.plan.broken_gpus import pods_with_broken_gpus
from fastgen_operator.plan.drift import first_lost_field
from fastgen_operator.plan.foreign import ForeignField, foreign_fields
from fastgen_operator.plan.model_cache import gate_on_model, hold_template, kept_open, with_template_of
from fastgen_operator.plan.observed import Observed, is_controlled_by
from fastgen_operator.plan.rewritten import RewrittenField, rewritten_fields
from fastgen_operator.plan.rollout import deletion_costs, pods_to_replace, pods_with_deletion_cost, unblock_rollout


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that keeps the children from matching the spec: reason and message of a condition."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply, and its reason for the Event and the log.

    Attributes:
        drift: path of the first field that another writer changed; None if the spec is the reason.
        instead: what to apply if this is rejected: the rest of the Deployment, with its live pod template.
        take_over: fields of other managers that the apply has to remove.
    """

    kind: Kind
    manifest: Object
    why: str
    drift: str | None = None
    instead: Apply | None = None
    take_over: tuple[ForeignField, ...] = ()


@dataclass(frozen=True, slots=True)
class SetDeletionCost:
    """A deletion cost to write to one pod."""

    pod: Object
    cost: str


@dataclass(frozen=True, slots=True)
class Delete:
    """One child, or one pod to replace, to delete, and the reason.

    Attributes:
        only_unchanged: leave it if it has changed since it was read, for example if the pod was scheduled.
    """

    kind: Kind
    child: Object
    why: str
    only_unchanged: bool = False


@dataclass(frozen=True, slots=True)
class EndJob:
    """One Job to end, because its download is complete but other containers keep its pod running."""

    job: Object
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Writes in order, the problem that prevents others, and missing information. Empty in the steady state.

    Attributes:
        rewritten: fields of the Deployment that admission changes in every write. Writing again would not help.
        names_to_look_up: children that the plan creates. The cache has only labelled objects, so another object
            may have the name.
        loads_to_read: pods to read the tokens in flight from, if the applies remove some of them.
    """

    deletion_costs: tuple[SetDeletionCost, ...] = ()
    applies: tuple[Apply, ...] = ()
    ends: tuple[EndJob, ...] = ()
    deletes: tuple[Delete, ...] = ()
    problem: Problem | None = None
    rewritten: tuple[RewrittenField, ...] = ()
    names_to_look_up: tuple[tuple[Kind, str], ...] = ()
    loads_to_read: tuple[Object, ...] = ()

    @property
    def writes_nothing(self) -> bool:
        """Whether the children are as they should be, apart from what admission rewrites."""
        return replace(self, rewritten=()) == Plan()


def parse_spec(resource: Object) -> Spec | Problem:
    """Return the typed spec, or a problem if the cluster's CRD and this operator are of different versions."""
    try:
        return Spec.model_validate(resource.get("spec", {}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["spec", *(str(part) for part in first["loc"])])
        return Problem("InvalidSpec", f"{field}: {first['msg']}: apply the CRD that belongs to this operator")


def combine(problems: Sequence[Problem]) -> Problem | None:
    """Return one problem with the reason of the first and the messages of all; None if there are none."""
    if not problems:
        return None
    return Problem(problems[0].reason, "; ".join(dict.fromkeys(problem.message for problem in problems)))


def make_plan(spec: Spec, observed: Observed, platform: Platform) -> Plan:
    """Compare the children that the spec needs with those observed.

    An object of an optional kind that another owner created under a child's name serves in the child's place.
    A problem of one child does not hold back the others.
    """
    problems: list[Problem] = []
    settled = unblock_rollout(spec, observed)
    try:
        children = build_children(observed.resource, settled, platform, observed.desired_replicas)
        gated = gate_on_model(children, spec, observed, platform.pods)
    except TemplateRefused as refusal:
        problems.append(Problem("PodTemplateRefused", f"{refusal}; the pods stay unchanged"))
        scheduling = settled.scheduling.model_copy(update={"affinity": None})
        plain = settled.model_copy(update={"pod_template": None, "scheduling": scheduling})
        children = build_children(observed.resource, plain, platform, observed.desired_replicas)
        gated = hold_template(children, observed)
    wanted = [
        (kind, manifest)
        for kind, manifest in gated.children
        if not (kind in OPTIONAL_KINDS and _is_foreign(kind, manifest["metadata"]["name"], observed))
    ]
    taken = [
        problem
        for kind, manifest in wanted
        if (problem := _foreign_child(kind, manifest["metadata"]["name"], observed)) is not None
    ]
    problems += taken
    problems += [Problem("InvalidSchedule", fault) for fault in faults(spec.autoscaling)]
    if taken and not _owns_deployment(observed):
        # Nothing serves yet: create nothing that would depend on another owner's objects.
        return Plan(problem=combine(problems))
    own = [child for child in wanted if not _is_foreign(child[0], child[1]["metadata"]["name"], observed)]
    compared = ((kind, manifest, observed.child(kind, manifest["metadata"]["name"])) for kind, manifest in own)
    applies = tuple(apply for kind, manifest, live in compared if (apply := _apply(kind, manifest, live)) is not None)
    removes = any(apply.kind == DEPLOYMENT and _removes_pods(apply, observed.deployment) for apply in applies)
    costs = tuple(SetDeletionCost(pod, cost) for pod, cost in deletion_costs(observed)) if removes else ()
    names = ((apply.kind, apply.manifest["metadata"]["name"]) for apply in applies)
    unknown = tuple((kind, name) for kind, name in names if observed.child(kind, name) is None)
    # A Deployment that the cache does not hold may exist without its label, with pods to remove.
    needs_loads = removes or any(kind == DEPLOYMENT for kind, _ in unknown)
    return Plan(
        deletion_costs=costs,
        applies=applies,
        ends=_finished_downloads(observed),
        deletes=(*_unwanted(wanted, gated.kept_jobs, observed), *_replaced_pods(spec, observed)),
        problem=combine(problems),
        rewritten=() if any(apply.kind == DEPLOYMENT for apply in applies) else _rewritten(own, observed),
        names_to_look_up=unknown,
        loads_to_read=pods_with_deletion_cost(observed) if needs_loads and not observed.in_flight_tokens else (),
    )


def _finished_downloads(observed: Observed) -> tuple[EndJob, ...]:
    """Return the Jobs to end. Until then neither the Job nor its pod ends, and both hold resources and the volume."""
    why = "ended: the download is complete, but its pod does not end, because of the running container {}"
    return tuple(EndJob(job, why.format(" and ".join(containers))) for job, containers in kept_open(observed))


def _rewritten(wanted: Sequence[tuple[Kind, Object]], observed: Observed) -> tuple[RewrittenField, ...]:
    """Return the fields of the Deployment that admission rewrites; `wanted` has what was applied last."""
    manifest, live = next((manifest for kind, manifest in wanted if kind == DEPLOYMENT), None), observed.deployment
    return () if manifest is None or live is None else rewritten_fields(manifest, live)


def _unwanted(wanted: Sequence[tuple[Kind, Object]], jobs: Iterable[str], observed: Observed) -> tuple[Delete, ...]:
    """Return deletions of own children that the spec no longer needs, except these Jobs."""
    keep = {(kind, manifest["metadata"]["name"]) for kind, manifest in wanted} | {(JOB, name) for name in jobs}
    return tuple(
        Delete(kind, child, "deleted: the spec does not ask for it any more")
        for (kind, name), child in observed.children.items()
        if (kind, name) not in keep
        and is_controlled_by(child, observed.resource)
        and not child["metadata"].get("deletionTimestamp")
    )


def _replaced_pods(spec: Spec, observed: Observed) -> tuple[Delete, ...]:
    waited = "replaced: it waited for a node that the volume has left"
    found = (
        *((pod, waited) for pod in pods_to_replace(spec, observed)),
        *((pod, f"replaced: {failure}") for pod, failure in pods_with_broken_gpus(spec, observed)),
    )
    return tuple(Delete(POD, pod, why, only_unchanged=True) for pod, why in found)


def _foreign_child(kind: Kind, name: str, observed: Observed) -> Problem | None:
    """Return a problem if the child's name belongs to an object of another owner, which is never taken over."""
    if not _is_foreign(kind, name, observed):
        return None
    return Problem(
        "NameTaken",
        f"a {kind.name} named {name} exists and does not belong to this FastGenDeployment: delete that {kind.name}, "
        "or create the FastGenDeployment under another name",
    )


def _owns_deployment(observed: Observed) -> bool:
    return observed.deployment is not None and is_controlled_by(observed.deployment, observed.resource)


def _is_foreign(kind: Kind, name: str, observed: Observed) -> bool:
    live = observed.child(kind, name)
    return live is not None and not is_controlled_by(live, observed.resource)


def _apply(kind: Kind, manifest: Object, live: Object | None) -> Apply | None:
    """Return the apply of a child that differs from its manifest, or None."""
    wanted = _fingerprint(manifest)
    annotations = {**manifest["metadata"].get("annotations", {}), APPLIED_ANNOTATION: wanted}
    annotated = {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
    if live is None:
        return Apply(kind, annotated, "created")
    foreign = _conflicting_fields(manifest, live) if kind == DEPLOYMENT else ()
    if (applied := applied_fingerprint(live)) != wanted:
        why = _spec_change(kind, manifest, live, applied)
        rest = _rest_of(manifest, live) if kind == DEPLOYMENT else None
        return Apply(kind, annotated, why, instead=rest, take_over=foreign)
    drift = first_lost_field(annotated, live)
    if drift is not None:
        return Apply(kind, annotated, f"restored: {drift} had been changed{_by(live)}", drift, take_over=foreign)
    if foreign:
        first = foreign[0]
        why = f"restored: {first.name} had been added by {first.manager}"
        return Apply(kind, annotated, why, first.name, take_over=foreign)
    return None


def _conflicting_fields(manifest: Object, live: Object) -> tuple[ForeignField, ...]:
    """Return the fields of other managers to remove; none while the live pod template is kept."""
    if template_digest(manifest) == template_digest(live):
        return ()
    return tuple(field for field in foreign_fields(live) if field.conflicts)


def _by(live: Object) -> str:
    """Return who may have changed the object."""
    managers = foreign_managers(live)
    return f" by {', '.join(managers)}" if managers else ""


def _rest_of(manifest: Object, live: Object) -> Apply | None:
    """Return the apply of a Deployment with its live pod template; None if nothing else differs."""
    if not _changed_fields(manifest, live) or template_digest(manifest) == template_digest(live):
        return None
    return _apply(DEPLOYMENT, with_template_of(manifest, live), live)


def _fingerprint(manifest: Object) -> str:
    """Return the value of a child's annotation: a hash of its manifest, and one of its pod template."""
    template = manifest.get("spec", {}).get("template")
    return f"{fingerprint(manifest)}-{fingerprint(template)}" if template is not None else fingerprint(manifest)


def _spec_change(kind: Kind, manifest: Object, live: Object, applied: str) -> str:
    """Return the reason of an apply whose manifest differs from the one applied last."""
    if kind == DEPLOYMENT:
        wanted, before = manifest["spec"]["replicas"], live["spec"].get("replicas")
        if _fingerprint(_with_spec(manifest, replicas=before)) == applied:
            return f"scaled from {before} to {counted(wanted)}"
        update = manifest["spec"]["strategy"]["rollingUpdate"]
        room = live["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable")
        strategy = {**manifest["spec"]["strategy"], "rollingUpdate": {**update, "maxUnavailable": room}}
        if _fingerprint(_with_spec(manifest, strategy=strategy)) == applied:
            return f"may have {counted(update['maxUnavailable'], 'pod')} unavailable from now on ({room} before)"
        if template_digest(manifest) == template_digest(live):
            return _change_of_rest(manifest, live)
    return "updated to the new spec"


def _change_of_rest(manifest: Object, live: Object) -> str:
    """Return the reason of an apply that keeps the live pod template."""
    changed = _changed_fields(manifest, live)
    if changed == ["replicas"]:
        return f"scaled from {live['spec']['replicas']} to {counted(manifest['spec']['replicas'])}"
    return "updated to the new spec, except its pod template" if changed else "keeps its pod template"


def _changed_fields(manifest: Object, live: Object) -> list[str]:
    """Return the fields of the spec, besides the pod template, whose live value differs."""
    spec = manifest["spec"].items()
    return [name for name, value in spec if name != "template" and live["spec"].get(name) != value]


def _with_spec(manifest: Object, **fields: Any) -> Object:
    return {**manifest, "spec": {**manifest["spec"], **fields}}


def _removes_pods(apply: Apply, live: Object | None) -> bool:
    """Return whether the Deployment controller deletes pods after the apply: fewer replicas, or another template."""
    if live is None:
        return False
    if apply.manifest["spec"]["replicas"] < live["spec"].get("replicas", 0):
        return True
    if apply.drift is not None:
        return apply.drift.startswith(("spec.template", "metadata.managedFields"))
    template = applied_fingerprint(apply.manifest).rpartition("-")[2]
    is_same = applied_fingerprint(live).rpartition("-")[2] == template
    # While the model is downloaded, the live template is kept, with the API server's defaults.
    return not is_same and template_digest(apply.manifest) != template_digest(live)
