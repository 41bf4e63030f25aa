"""What has to be written so that the children are as the spec says. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fastgen_operator.api import Spec
from fastgen_operator.children import Platform, build_children
from fastgen_operator.children.template import TemplateRefused
from fastgen_operator.digests import fingerprint
from fastgen_operator.kinds import APPLIED_ANNOTATION, DEPLOYMENT, JOB, OPTIONAL_KINDS, Kind, Object
from fastgen_operator.plan.drift import first_difference
from fastgen_operator.plan.model_cache import settle
from fastgen_operator.plan.observed import Observed, is_controlled_by
from fastgen_operator.plan.replicas import wanted_replicas
from fastgen_operator.plan.rollout import deletion_costs, loses_pods, room_reason, with_room


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the children cannot be brought to the spec: a condition's reason and message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply, and why it is needed, for the event and the log.

    `drift` is the path of the first field that somebody else had changed; None where the spec is the reason.
    """

    kind: Kind
    manifest: Object
    why: str
    drift: str | None = None


@dataclass(frozen=True, slots=True)
class SetDeletionCost:
    """The deletion cost to write on one pod."""

    pod: Object
    cost: str


@dataclass(frozen=True, slots=True)
class Delete:
    """One child to delete, and why."""

    kind: Kind
    child: Object
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Writes in order, and what stands in their way. In the steady state all are empty.

    Attributes:
        loses_pods: the applies make pods go, so that it matters which ones.
    """

    weighs: tuple[SetDeletionCost, ...] = ()
    applies: tuple[Apply, ...] = ()
    deletes: tuple[Delete, ...] = ()
    problem: Problem | None = None
    loses_pods: bool = False


def parse_spec(resource: Object) -> Spec | Problem:
    """The typed spec, or why it cannot be read: then the cluster's CRD and this operator are of two versions."""
    try:
        return Spec.model_validate(resource.get("spec", {}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["spec", *(str(part) for part in first["loc"])])
        return Problem("InvalidSpec", f"{field}: {first['msg']}: apply the CRD that belongs to this operator")


def make_plan(spec: Spec, observed: Observed, platform: Platform) -> Plan:
    """Compares what should be with what is.

    Where somebody else has made an object of an optional kind by a child's name, that one does, and ours is not made.
    """
    try:
        children = build_children(
            observed.resource, with_room(spec, observed), platform, wanted_replicas(spec, observed)
        )
    except TemplateRefused as refusal:
        return Plan(problem=Problem("PodTemplateRefused", str(refusal)))
    settled = settle(children, spec, observed)
    wanted = [
        (kind, plain)
        for kind, plain in settled.children
        if not (kind in OPTIONAL_KINDS and _is_foreign(kind, plain["metadata"]["name"], observed))
    ]
    for kind, plain in wanted:
        problem = _foreign_child(kind, plain["metadata"]["name"], observed)
        if problem is not None:
            return Plan(problem=problem)
    applies = tuple(
        apply
        for kind, plain in wanted
        if (apply := _apply(kind, _with_fingerprint(plain), observed.child(kind, plain["metadata"]["name"])))
        is not None
    )
    loses = any(apply.kind == DEPLOYMENT and loses_pods(apply.manifest, observed.deployment) for apply in applies)
    weighs = tuple(SetDeletionCost(pod, cost) for pod, cost in deletion_costs(observed)) if loses else ()
    return Plan(weighs, applies, _unwanted(wanted, settled.kept_jobs, observed), loses_pods=loses)


def _unwanted(wanted: Sequence[tuple[Kind, Object]], jobs: Iterable[str], observed: Observed) -> tuple[Delete, ...]:
    """Children of ours that the spec does not ask for any more; of Jobs, those of these names stay."""
    keep = {(kind, manifest["metadata"]["name"]) for kind, manifest in wanted} | {(JOB, name) for name in jobs}
    return tuple(
        Delete(kind, child, "deleted: the spec does not ask for it any more")
        for (kind, name), child in observed.children.items()
        if (kind, name) not in keep
        and is_controlled_by(child, observed.resource)
        and not child["metadata"].get("deletionTimestamp")
    )


def _foreign_child(kind: Kind, name: str, observed: Observed) -> Problem | None:
    """An object of that name that belongs to somebody else is never taken over."""
    if not _is_foreign(kind, name, observed):
        return None
    return Problem(
        "NameTaken",
        f"a {kind.name} named {name} exists and does not belong to this FastGenDeployment: delete that {kind.name}, "
        "or create the FastGenDeployment under another name",
    )


def _is_foreign(kind: Kind, name: str, observed: Observed) -> bool:
    live = observed.child(kind, name)
    return live is not None and not is_controlled_by(live, observed.resource)


def _with_fingerprint(manifest: Object) -> Object:
    annotations = {**manifest["metadata"].get("annotations", {}), APPLIED_ANNOTATION: fingerprint(manifest)}
    metadata: dict[str, Any] = {**manifest["metadata"], "annotations": annotations}
    return {**manifest, "metadata": metadata}


def _apply(kind: Kind, manifest: Object, live: Object | None) -> Apply | None:
    if live is None:
        return Apply(kind, manifest, "created")
    applied = live["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION)
    if applied != manifest["metadata"]["annotations"][APPLIED_ANNOTATION]:
        # Also where a field was taken out of the spec: what is not wanted any more shows only in the fingerprint.
        why = _scaled(manifest, live) or (room_reason(manifest, live) if kind == DEPLOYMENT else None)
        return Apply(kind, manifest, why or "updated to the new spec")
    drift = first_difference(manifest, live)
    return None if drift is None else Apply(kind, manifest, f"restored: {drift} had been changed", drift)


def _scaled(manifest: Object, live: Object) -> str | None:
    """The words for a change of nothing but the replicas; None for any other."""
    wanted, before = manifest["spec"].get("replicas"), live.get("spec", {}).get("replicas")
    if wanted == before or wanted is None or before is None:
        return None
    rest = {name: value for name, value in manifest["spec"].items() if name != "replicas"}
    return None if first_difference(rest, live["spec"]) else f"scaled from {before} to {wanted} replicas"
