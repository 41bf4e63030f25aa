"""Download Jobs, and the pod template that waits for them. Pure.

When spec.model changes, the pods keep their template until the new model is in the volume. The rest of the Deployment,
such as its replicas, follows the spec meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastgen_operator.children.colocation import runs_on_one_node
from fastgen_operator.children.model_cache import build_fetch_job
from fastgen_operator.children.model_source import FETCH_CONTAINER, VOLUME, is_preloaded, model_address
from fastgen_operator.children.placement import ANYWHERE, Placement, placement_of
from fastgen_operator.children.platform import PodSettings
from fastgen_operator.kinds import (
    CACHED_ANNOTATION,
    CLAIM,
    DEPLOYMENT,
    FETCH_ANNOTATION,
    JOB,
    MODEL_ANNOTATION,
    Kind,
    Object,
)
from fastgen_operator.objects import annotations_of, name_of
from fastgen_operator.plan.observed import Observed, is_complete
from fastgen_operator.plan.situation import Situation
from fastgen_operator.quantities import quantity

Children = Sequence[tuple[Kind, Object]]


@dataclass(frozen=True, slots=True)
class GatedChildren:
    """The children that can be applied now.

    Attributes:
        children: manifests to apply.
        kept_jobs: names of existing Jobs to keep unchanged: Jobs are immutable.
        needs_nodes: the download waits until the cluster's nodes are read.
    """

    children: Children
    kept_jobs: frozenset[str] = frozenset()
    needs_nodes: bool = False


def gate_on_model(wanted: Children, situation: Situation, settings: PodSettings) -> GatedChildren:
    """Add a download Job if the model is not in the volume, and hold back the new pod template until it is."""
    observed, spec = situation.observed, situation.spec
    wanted = [(kind, _as_live(child, situation) if kind == CLAIM else child) for kind, child in wanted]
    if not is_preloaded(spec):
        return GatedChildren(wanted)
    if situation.is_cached:
        done = situation.complete_job
        return GatedChildren(wanted, frozenset() if done is None else frozenset({name_of(done)}))
    deployment = next(manifest for kind, manifest in wanted if kind == DEPLOYMENT)
    children = [child for child in wanted if child[0] != DEPLOYMENT]
    if (held := _held_back(deployment, observed)) is not None:
        children.append((DEPLOYMENT, held))
    if (claim := observed.claim) is None:
        return GatedChildren(children)
    engine_pod = deployment["spec"]["template"]["spec"]

    def build(placement: Placement) -> Object:
        return build_fetch_job(observed.resource, spec, settings, engine_pod, claim, _in_use(observed), placement)

    present = _same_download(build(ANYWHERE), observed)
    kept = frozenset() if present is None else frozenset({name_of(present)})
    if present is not None and not _waits_for_node(present, observed):
        return GatedChildren(children, kept)
    if (placement := _placement(claim, engine_pod, situation)) is None:
        return GatedChildren(children, kept, needs_nodes=True)
    job = build(placement)
    if observed.child(JOB, name_of(job)) is not None:
        return GatedChildren(children, frozenset({name_of(job)}))
    return GatedChildren([*children, (JOB, job)])


def _same_download(job: Object, observed: Observed) -> Object | None:
    """Return the Job that exists for this download, whatever the nodes that its pod may run on, or None."""
    fetch = annotations_of(job)[FETCH_ANNOTATION]
    same = (each for each in observed.jobs if annotations_of(each).get(FETCH_ANNOTATION) == fetch)
    # A Job of an earlier version lacks the annotation.
    return next(same, None) or observed.child(JOB, name_of(job))


def _waits_for_node(job: Object, observed: Observed) -> bool:
    pods = [pod for pod in observed.fetch_pods if pod.is_controlled_by(job)]
    return any(pod.unschedulable is not None for pod in pods)


def _placement(claim: Object, engine_pod: Object, situation: Situation) -> Placement | None:
    """Return where the download may run; None if that depends on nodes that were not read."""
    serving = [pod for pod in situation.observed.pods if pod.node and not pod.has_ended]
    if claim["spec"].get("volumeName") or (serving and runs_on_one_node(situation.spec)):
        # The volume, or the replicas that hold it, decide.
        return ANYWHERE
    if situation.nodes is None:
        return None
    try:
        placement = placement_of(engine_pod, situation.nodes)
    except (AttributeError, KeyError, TypeError, ValueError):
        # Fields of spec.podTemplate or spec.scheduling.affinity of the wrong type, which the API server will name.
        return ANYWHERE
    # Replicas that serve may hold the last GPU until the model is in the volume.
    return replace(placement, requests={}) if serving else placement


def _as_live(claim: Object, situation: Situation) -> Object:
    """Return the claim with the size that it has grown to, and with the model that was downloaded to it."""
    if (live := situation.observed.claim) is None:
        return claim
    wanted, size = claim["spec"]["resources"]["requests"]["storage"], _size_of(live)
    grown = (quantity(size) or 0) > (quantity(wanted) or 0)
    fields = {**claim["spec"], "resources": {"requests": {"storage": size if grown else wanted}}}
    record = situation.cached_model
    annotations = {} if record is None else {"annotations": {CACHED_ANNOTATION: record}}
    return {**claim, "metadata": {**claim["metadata"], **annotations}, "spec": fields}


def _size_of(claim: Object) -> str:
    return str(claim["spec"].get("resources", {}).get("requests", {}).get("storage", "0"))


def hold_template(wanted: Children, observed: Observed) -> GatedChildren:
    """Keep the live pod template and all Jobs, because the spec's template cannot be used."""
    live = observed.deployment
    children = [child for child in wanted if child[0] != DEPLOYMENT]
    if live is not None:
        deployment = next(manifest for kind, manifest in wanted if kind == DEPLOYMENT)
        children.append((DEPLOYMENT, with_template_of(deployment, live)))
    return GatedChildren(children, frozenset(map(name_of, observed.jobs)))


def with_template_of(deployment: Object, live: Object) -> Object:
    """Return the Deployment with the pod template of the live one."""
    template = live["spec"]["template"]
    metadata = {name: value for name, value in template["metadata"].items() if name != "creationTimestamp"}
    held = {"metadata": metadata, "spec": template["spec"]}
    return {**deployment, "spec": {**deployment["spec"], "template": held}}


def serves_model(situation: Situation) -> bool:
    """Return whether what was promised serves the spec's model from the volume: replicas, or minReplicas."""
    observed, spec = situation.observed, situation.spec
    if observed.deployment is None:
        return False
    ready = sum(pod.is_ready for pod in observed.current_pods)
    wanted = (model_address(spec), observed.key[1])
    is_enough = 0 < situation.desired_replicas <= ready or (ready > 0 and spec.has_minimum(ready))
    return is_enough and _model_of(observed.deployment["spec"]["template"]) == wanted


def kept_open(observed: Observed) -> list[tuple[Object, tuple[str, ...]]]:
    """Return the Jobs whose download is complete, but whose pod still runs other containers, with their names.

    Sidecars (init containers with restartPolicy Always) end with the others, and do not count.
    """
    found = []
    for job in observed.jobs:
        pods = [pod for pod in observed.fetch_pods if pod.is_controlled_by(job)]
        fetched = (pod for pod in pods if pod.container(FETCH_CONTAINER).has_succeeded)
        containers = (each for pod in fetched for each in pod.containers if each.role == "container")
        running = {each.name for each in containers if each.is_running}
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
    found = {pod.model for pod in observed.pods}
    if deployment is not None:
        found.add(annotations_of(deployment["spec"]["template"]).get(MODEL_ANNOTATION))
    claim = observed.claim
    # What is remembered as downloaded has to stay.
    found |= set() if claim is None else {annotations_of(claim).get(CACHED_ANNOTATION, "").partition("/")[2]}
    return {address for address in found if address}
