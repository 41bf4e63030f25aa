"""The download of the model to the volume, and the pod template that waits for it. Pure.

With spec.cache.preload, when spec.model changes, the pods keep their template until the new model is in the volume. The
rest of the Deployment, such as its replicas, follows the spec meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fastgen_operator.children.desired import Desired
from fastgen_operator.children.download_placement import ANYWHERE, Placement, placement_of
from fastgen_operator.children.model_cache import build_fetch_job
from fastgen_operator.children.model_volume import VOLUME
from fastgen_operator.kinds import CLAIM, JOB, Object
from fastgen_operator.labels_and_annotations import MODEL_ANNOTATION
from fastgen_operator.objects.container import FETCH_CONTAINER
from fastgen_operator.objects.model_cache import Claim, Job
from fastgen_operator.objects.stored import name_of
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation


@dataclass(frozen=True, slots=True)
class EndJob:
    """One Job to end, because its download is complete but other containers keep its pod running."""

    job: Job
    why: str


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """What can be applied now.

    Attributes:
        template: the pod template; None for no Deployment yet.
        job: the Job to create, if any.
        kept_jobs: names of existing Jobs to keep unchanged: Jobs are immutable.
        needs_nodes: the download waits until the cluster's nodes are read.
    """

    template: Object | None
    job: Object | None = None
    kept_jobs: frozenset[str] = frozenset()
    needs_nodes: bool = False


def plan_download(desired: Desired, template: Object | None, situation: Situation) -> DownloadPlan:
    """Return the download that the spec's model needs, and the pod template until it is complete.

    Args:
        template: the pod template of the spec; None if it cannot be used: then the live one and all Jobs are kept. So
            they are if a claim with the cache's name belongs to another owner: the author of a FastGenDeployment may
            have no access to that claim.
    """
    observed = situation.observed
    live = None if observed.deployment is None else observed.deployment.template
    if template is None or (desired.spec.cache is not None and _is_claim_taken(observed)):
        return DownloadPlan(live, kept_jobs=frozenset(job.name for job in observed.jobs))
    if not situation.spec.is_preloaded:
        return DownloadPlan(template)
    if situation.is_cached:
        done = situation.complete_job
        return DownloadPlan(template, kept_jobs=frozenset() if done is None else frozenset({done.name}))
    held = live if live is None or _model_of(live) != _model_of(template) else template
    if (claim := observed.claim) is None:
        return DownloadPlan(held)
    engine_pod = template["spec"]

    def build(placement: Placement) -> Object:
        return build_fetch_job(desired, engine_pod, claim.uid, _in_use(observed), placement)

    present = _same_download(build(ANYWHERE), observed)
    kept = frozenset() if present is None else frozenset({present.name})
    if present is not None and all(pod.unschedulable is None for pod in observed.pods_of(present)):
        return DownloadPlan(held, None, kept)
    if (placement := _placement(claim, engine_pod, situation)) is None:
        return DownloadPlan(held, None, kept, needs_nodes=True)
    job = build(placement)
    if observed.child(JOB, name_of(job)) is not None:
        return DownloadPlan(held, None, frozenset({name_of(job)}))
    return DownloadPlan(held, job)


def _is_claim_taken(observed: Observed) -> bool:
    found = observed.child(CLAIM)
    return found is not None and not observed.owns(found)


def _same_download(job: Object, observed: Observed) -> Job | None:
    """Return the existing Job with this download, even if its pod may run on other nodes; None without one."""
    wanted = Job(job)
    # A Job of an earlier version lacks the annotation.
    earlier = observed.child(JOB, wanted.name)
    same = (each for each in observed.jobs if each.fetch == wanted.fetch)
    return next(same, None if earlier is None else Job(earlier))


def _placement(claim: Claim, engine_pod: Object, situation: Situation) -> Placement | None:
    """Return where the download may run; None if that depends on nodes that were not read."""
    serving = [pod for pod in situation.observed.pods if pod.node and not pod.has_ended]
    if claim.is_bound or (serving and situation.spec.runs_on_one_node):
        # The volume, or the replicas that hold it, determine the node.
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


def serves_model(situation: Situation) -> bool:
    """Return whether the desired replicas, or minReplicas, serve the spec's model from the volume."""
    observed, spec = situation.observed, situation.spec
    if observed.deployment is None:
        return False
    ready = sum(pod.is_ready for pod in observed.current_pods)
    wanted = (spec.model.address, observed.key[1])
    is_enough = 0 < situation.desired_replicas <= ready or (ready > 0 and spec.has_minimum(ready))
    return is_enough and _model_of(observed.deployment.template) == wanted


def finished_downloads(observed: Observed) -> tuple[EndJob, ...]:
    """Return the Jobs whose download is complete, but whose pod still runs other containers.

    Until then neither the Job nor its pod ends, and both hold resources and the volume. Sidecars (init containers with
    restartPolicy Always) end with the others, and do not count.
    """
    found = []
    for job in observed.jobs:
        fetched = (pod for pod in observed.pods_of(job) if pod.container(FETCH_CONTAINER).has_succeeded)
        containers = (each for pod in fetched for each in pod.containers if each.role == "container")
        running = sorted({each.name for each in containers if each.is_running})
        if running and not job.is_complete:
            why = "ended: the download is complete, but its pod does not end, because of the running container "
            found.append(EndJob(job, why + " and ".join(running)))
    return tuple(found)


def claims_of(template: Object) -> tuple[Any, ...]:
    """Return the claim from which the pods of a template read the model, or None if it is in their own volume."""
    volumes = template["spec"].get("volumes", ())
    return tuple(each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes if each["name"] == VOLUME)


def _model_of(template: Object) -> tuple[Any, ...]:
    """Return the model and the claim that the pods of a template use."""
    return _address_of(template), *claims_of(template)


def _address_of(template: Object) -> str | None:
    """Return the address of the model that the pods of a template read from a volume, or None."""
    address: str | None = (template["metadata"].get("annotations") or {}).get(MODEL_ANNOTATION)
    return address


def _in_use(observed: Observed) -> set[str]:
    """Return the addresses of the models to keep in the volume.

    These are the models that pods use or may still use, and the one that the claim records as downloaded.
    """
    deployment, claim = observed.deployment, observed.claim
    serving = None if deployment is None else _address_of(deployment.template)
    remembered = None if claim is None else claim.cached_record.partition("/")[2]
    pods = (*observed.pods, *observed.canary_pods)
    return {address for address in (*(pod.model for pod in pods), serving, remembered) if address}
