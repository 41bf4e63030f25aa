"""Whether and why a child is applied: its manifest compared with the live object. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen_operator.autoscale.decision import counted
from fastgen_operator.kinds import DEPLOYMENT, Kind, Object
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION
from fastgen_operator.objects.deployment import Deployment, template_digest
from fastgen_operator.objects.managed_fields import foreign_managers
from fastgen_operator.objects.stored import applied_fingerprint, fingerprint, name_of
from fastgen_operator.plan.drift import first_lost_field
from fastgen_operator.plan.foreign_fields import ForeignField, foreign_fields


@dataclass(frozen=True, slots=True)
class Apply:
    """One server-side apply, and its reason for the Event and the log.

    Attributes:
        drift: path of the first field that another writer changed or added; None if the spec is the reason.
        instead: what to apply if this is rejected: the rest of the Deployment, with its live pod template. None for
            other kinds, for restores, and unless both the rest and the template differ.
        take_over: fields of other managers that the apply has to remove.
    """

    kind: Kind
    manifest: Object
    why: str
    drift: str | None = None
    instead: Apply | None = None
    take_over: tuple[ForeignField, ...] = ()

    @property
    def name(self) -> str:
        """The child's name."""
        return name_of(self.manifest)


def apply_of(kind: Kind, manifest: Object, live: Object | None) -> Apply | None:
    """Return the apply that creates a child or makes it match its manifest; None if it matches."""
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
    """Return words for the managers that may have changed the object; empty if there is none."""
    managers = foreign_managers(live)
    return f" by {', '.join(managers)}" if managers else ""


def _rest_of(manifest: Object, live: Object) -> Apply | None:
    """Return the apply of a Deployment with its live pod template; None if nothing else differs."""
    if not _changed_fields(manifest, live) or template_digest(manifest) == template_digest(live):
        return None
    return apply_of(DEPLOYMENT, _with_spec(manifest, template=Deployment(live).template), live)


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


def removes_pods(apply: Apply, live: Object | None) -> bool:
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
