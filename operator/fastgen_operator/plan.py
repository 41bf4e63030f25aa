"""What has to be written so that the children are as the spec says. Pure: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fastgen_operator.api import Spec
from fastgen_operator.children.deployment import build_deployment
from fastgen_operator.children.service import build_service
from fastgen_operator.drift import fingerprint, first_difference
from fastgen_operator.kinds import APPLIED_ANNOTATION, DEPLOYMENT, SERVICE, Kind, Object
from fastgen_operator.world import World, is_controlled_by


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the children cannot be brought to the spec: a condition's reason and message."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply, and why it is needed, for the event and the log."""

    kind: Kind
    manifest: Object
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Writes in order, and what stands in their way. In the steady state both are empty."""

    applies: tuple[Apply, ...] = ()
    problem: Problem | None = None


def parse_spec(resource: Object) -> Spec | Problem:
    """The typed spec, or why it cannot be read: then the cluster's CRD and this operator are of two versions."""
    try:
        return Spec.model_validate(resource.get("spec", {}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["spec", *(str(part) for part in first["loc"])])
        return Problem("InvalidSpec", f"{field}: {first['msg']}: apply the CRD that belongs to this operator")


def make_plan(spec: Spec, world: World, engine_image: str) -> Plan:
    """Compares what should be with what is."""
    wanted = (
        # The Service first: its name resolves by the time that a pod is ready.
        (SERVICE, build_service(world.resource)),
        (DEPLOYMENT, build_deployment(world.resource, spec, engine_image)),
    )
    for kind, _ in wanted:
        problem = _foreign_child(kind, world)
        if problem is not None:
            return Plan(problem=problem)
    applies = tuple(
        Apply(kind, manifest, why)
        for kind, plain in wanted
        for manifest in [_with_fingerprint(plain)]
        if (why := _reason_to_write(manifest, world.child(kind))) is not None
    )
    return Plan(applies)


def _foreign_child(kind: Kind, world: World) -> Problem | None:
    """An object of that name that belongs to somebody else is never taken over."""
    live = world.child(kind)
    if live is None or is_controlled_by(live, world.resource):
        return None
    name = world.key[1]
    return Problem(
        "NameTaken",
        f"a {kind.name} named {name} exists and does not belong to this FastGenDeployment: delete that {kind.name}, "
        "or create the FastGenDeployment under another name",
    )


def _with_fingerprint(manifest: Object) -> Object:
    metadata: dict[str, Any] = {**manifest["metadata"], "annotations": {APPLIED_ANNOTATION: fingerprint(manifest)}}
    return {**manifest, "metadata": metadata}


def _reason_to_write(manifest: Object, live: Object | None) -> str | None:
    if live is None:
        return "created"
    applied = live["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION)
    if applied != manifest["metadata"]["annotations"][APPLIED_ANNOTATION]:
        # Also where a field was taken out of the spec: what is not wanted any more shows only in the fingerprint.
        return "updated to the new spec"
    difference = first_difference(manifest, live)
    return None if difference is None else f"restored: {difference} had been changed"
