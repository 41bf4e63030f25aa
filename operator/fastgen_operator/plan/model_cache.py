"""What the model's volume holds, and what waits for it: a Job's life, and the template that is held back. Pure.

A change of the model takes nothing away: the pods keep the template they have until the new model is in the volume.
Meanwhile everything else of the Deployment follows the spec, its replicas above all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.children.model_cache import build_fetch_job
from fastgen_operator.children.model_source import VOLUME, is_preloaded, model_address
from fastgen_operator.kinds import CLAIM, CLAIM_ANNOTATION, DEPLOYMENT, JOB, MODEL_ANNOTATION, Kind, Object
from fastgen_operator.plan.observed import Observed, is_controlled_by

Children = Sequence[tuple[Kind, Object]]


@dataclass(frozen=True, slots=True)
class Settled:
    """Children as they can be now.

    Attributes:
        children: to be applied where they are not like this.
        kept_jobs: names of live Jobs that stay as they are: a Job cannot be changed.
    """

    children: Children
    kept_jobs: frozenset[str] = frozenset()


def settle(wanted: Children, spec: Spec, observed: Observed) -> Settled:
    """What the spec asks for, with a download where one is needed, and with pods only of models that are there."""
    if not is_preloaded(spec):
        return Settled(wanted)
    done = complete_job(spec, observed)
    if done is not None:
        return Settled(wanted, frozenset({done["metadata"]["name"]}))
    deployment = next(manifest for kind, manifest in wanted if kind == DEPLOYMENT)
    children = [child for child in wanted if child[0] != DEPLOYMENT]
    if (held := _held_back(deployment, observed)) is not None:
        children.append((DEPLOYMENT, held))
    claim = live_claim(observed)
    if claim is None:
        return Settled(children)
    engine_pod = deployment["spec"]["template"]["spec"]
    job = build_fetch_job(observed.resource, spec, engine_pod, claim, _in_use(observed))
    if (name := job["metadata"]["name"]) and observed.child(JOB, name) is not None:
        return Settled(children, frozenset({name}))
    return Settled([*children, (JOB, job)])


def complete_job(spec: Spec, observed: Observed) -> Object | None:
    """The Job by which the model of this spec is in the volume that there is now."""
    claim = live_claim(observed)
    if claim is None:
        return None
    about = {MODEL_ANNOTATION: model_address(spec), CLAIM_ANNOTATION: claim["metadata"]["uid"]}
    return next(
        (job for job in jobs(observed) if is_complete(job) and about.items() <= annotations_of(job).items()), None
    )


def jobs(observed: Observed) -> list[Object]:
    """The resource's own download Jobs that are there to stay."""
    return [
        child
        for (kind, _), child in observed.children.items()
        if kind == JOB and is_controlled_by(child, observed.resource) and not child["metadata"].get("deletionTimestamp")
    ]


def live_claim(observed: Observed) -> Object | None:
    """The volume, unless it is somebody else's or on its way out."""
    claim = observed.child(CLAIM)
    if claim is None or claim["metadata"].get("deletionTimestamp") or not is_controlled_by(claim, observed.resource):
        return None
    return claim


def is_complete(job: Object) -> bool:
    """Whether the download ended well."""
    conditions = job.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Complete" and condition["status"] == "True" for condition in conditions)


def annotations_of(obj: Object) -> dict[str, str]:
    """An object's, or a pod template's, annotations."""
    found: dict[str, str] = obj.get("metadata", {}).get("annotations") or {}
    return found


def _held_back(deployment: Object, observed: Observed) -> Object | None:
    """The Deployment with the template that it has; None where there is none yet, and none is made."""
    live = observed.deployment
    if live is None:
        return None
    template = live["spec"]["template"]
    if _model_of(template) == _model_of(deployment["spec"]["template"]):
        return deployment
    metadata = {name: value for name, value in template["metadata"].items() if name != "creationTimestamp"}
    held = {"metadata": metadata, "spec": template["spec"]}
    return {**deployment, "spec": {**deployment["spec"], "template": held}}


def _model_of(template: Object) -> tuple[Any, ...]:
    """Which model the pods of a template use, and out of which volume."""
    volumes = template["spec"].get("volumes", ())
    claims = [each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes if each["name"] == VOLUME]
    return annotations_of(template).get(MODEL_ANNOTATION), *claims


def _in_use(observed: Observed) -> set[str]:
    """Addresses of the models that pods use, or may use again while the new one is not there."""
    deployment = observed.deployment
    templates = [] if deployment is None else [deployment["spec"]["template"]]
    found = {annotations_of(obj).get(MODEL_ANNOTATION) for obj in [*templates, *observed.pods]}
    return {address for address in found if address is not None}
