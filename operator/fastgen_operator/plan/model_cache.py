"""Download Jobs, and the pod template that waits for them. Pure.

When spec.model changes, the pods keep their template until the new model is in the volume. The rest of the Deployment,
such as its replicas, follows the spec meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastgen_operator.api import Spec
from fastgen_operator.children.model_cache import build_fetch_job
from fastgen_operator.children.model_source import FETCH_CONTAINER, VOLUME, is_preloaded, model_address
from fastgen_operator.children.platform import PodSettings
from fastgen_operator.kinds import (
    CLAIM,
    CLAIM_ANNOTATION,
    DEPLOYMENT,
    DOWNLOADED_ANNOTATION,
    JOB,
    MODEL_ANNOTATION,
    Kind,
    Object,
)
from fastgen_operator.objects import annotations_of
from fastgen_operator.plan.observed import Observed, is_controlled_by
from fastgen_operator.pods import condition_of, container_of, containers_of, is_terminating, name_of

Children = Sequence[tuple[Kind, Object]]


@dataclass(frozen=True, slots=True)
class GatedChildren:
    """The children that can be applied now.

    Attributes:
        children: manifests to apply.
        kept_jobs: names of existing Jobs to keep unchanged: Jobs are immutable.
    """

    children: Children
    kept_jobs: frozenset[str] = frozenset()


def gate_on_model(wanted: Children, spec: Spec, observed: Observed, settings: PodSettings) -> GatedChildren:
    """Add a download Job if the model is not in the volume, and hold back the new pod template until it is."""
    if not is_preloaded(spec):
        return GatedChildren(wanted)
    if (done := complete_job(spec, observed)) is not None:
        return GatedChildren(wanted, frozenset({name_of(done)}))
    deployment = next(manifest for kind, manifest in wanted if kind == DEPLOYMENT)
    children = [child for child in wanted if child[0] != DEPLOYMENT]
    if (held := _held_back(deployment, observed)) is not None:
        children.append((DEPLOYMENT, held))
    if (claim := live_claim(observed)) is None:
        return GatedChildren(children)
    engine_pod = deployment["spec"]["template"]["spec"]
    job = build_fetch_job(observed.resource, spec, settings, engine_pod, claim, _in_use(observed))
    if observed.child(JOB, name_of(job)) is not None:
        return GatedChildren(children, frozenset({name_of(job)}))
    return GatedChildren([*children, (JOB, job)])


def hold_template(wanted: Children, observed: Observed) -> GatedChildren:
    """Keep the live pod template and all Jobs, because the spec's template cannot be used."""
    live = observed.deployment
    children = [child for child in wanted if child[0] != DEPLOYMENT]
    if live is not None:
        deployment = next(manifest for kind, manifest in wanted if kind == DEPLOYMENT)
        children.append((DEPLOYMENT, with_template_of(deployment, live)))
    return GatedChildren(children, frozenset(map(name_of, jobs(observed))))


def with_template_of(deployment: Object, live: Object) -> Object:
    """Return the Deployment with the pod template of the live one."""
    template = live["spec"]["template"]
    metadata = {name: value for name, value in template["metadata"].items() if name != "creationTimestamp"}
    held = {"metadata": metadata, "spec": template["spec"]}
    return {**deployment, "spec": {**deployment["spec"], "template": held}}


def complete_job(spec: Spec, observed: Observed) -> Object | None:
    """Return the completed Job that downloaded the spec's model into the present volume, or None."""
    if (claim := live_claim(observed)) is None:
        return None
    about = {MODEL_ANNOTATION: model_address(spec), CLAIM_ANNOTATION: claim["metadata"]["uid"]}
    complete = (job for job in jobs(observed) if is_complete(job))
    return next((job for job in complete if about.items() <= annotations_of(job).items()), None)


def jobs(observed: Observed) -> list[Object]:
    """Return the resource's own download Jobs that are not being deleted."""
    return [
        child
        for (kind, _), child in observed.children.items()
        if kind == JOB and is_controlled_by(child, observed.resource) and not is_terminating(child)
    ]


def live_claim(observed: Observed) -> Object | None:
    """Return the claim, or None if it is missing, being deleted, or owned by another object."""
    claim = observed.child(CLAIM)
    usable = claim is not None and not is_terminating(claim) and is_controlled_by(claim, observed.resource)
    return claim if usable else None


def is_complete(job: Object) -> bool:
    """Return whether the download succeeded."""
    return job_has(job, "Complete") or DOWNLOADED_ANNOTATION in annotations_of(job)


def job_has(job: Object, kind: str) -> bool:
    """Return whether the Job's condition of this type is True."""
    return condition_of(job.get("status", {}), kind).get("status") == "True"


def kept_open(observed: Observed) -> list[tuple[Object, tuple[str, ...]]]:
    """Return the Jobs whose download is complete, but whose pod still runs other containers, with their names.

    Sidecars (init containers with restartPolicy Always) end with the others, and do not count.
    """
    found = []
    for job in jobs(observed):
        pods = [pod for pod in observed.fetch_pods if is_controlled_by(pod, job)]
        fetched = (pod for pod in pods if container_of(pod, FETCH_CONTAINER).has_succeeded)
        containers = (each for pod in fetched for each in containers_of(pod) if each.role == "container")
        running = {each.status["name"] for each in containers if each.running is not None}
        if running and not is_complete(job):
            found.append((job, tuple(sorted(running))))
    return found


def _held_back(deployment: Object, observed: Observed) -> Object | None:
    """Return the Deployment with its live template; None if it does not exist: it is not created yet."""
    live = observed.deployment
    if live is None:
        return None
    if _model_of(live["spec"]["template"]) == _model_of(deployment["spec"]["template"]):
        return deployment
    return with_template_of(deployment, live)


def _model_of(template: Object) -> tuple[Any, ...]:
    """Return the model and the claim that the pods of a template use."""
    volumes = template["spec"].get("volumes", ())
    claims = [each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes if each["name"] == VOLUME]
    return annotations_of(template).get(MODEL_ANNOTATION), *claims


def _in_use(observed: Observed) -> set[str]:
    """Return the addresses of the models that pods use, or may use until the new one is downloaded."""
    deployment = observed.deployment
    templates = [] if deployment is None else [deployment["spec"]["template"]]
    found = {annotations_of(obj).get(MODEL_ANNOTATION) for obj in [*templates, *observed.pods]}
    return {address for address in found if address is not None}
