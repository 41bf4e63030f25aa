"""The condition ModelCached: whether the model is downloaded.

Sources: the completed downloads, or ready pods with the model; then Jobs without a pod, and their Events; then the
download container of the Job's pod, or of each engine pod. After a failure, the condition is False until the next
attempt. Engine pods without a node are reported by PodsScheduled. A failed download is resumed automatically
after at most five minutes, unless its Job was ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from fastgen.fetch.errors import ACCESS_DENIED, SOURCE_NOT_FOUND, VOLUME_FULL
from fastgen_operator.children.colocation import VOLUME_ON_ONE_NODE
from fastgen_operator.objects.container import FETCH_CONTAINER, IMAGE_PULL_REASONS
from fastgen_operator.objects.pod import Pod, queue_message
from fastgen_operator.plan.model_cache import serves_model
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.pod_failures import failure_of, state_of
from fastgen_operator.plan.situation import Situation
from fastgen_operator.quantities import quantity
from fastgen_operator.status.conditions.condition import Condition, false, true, unknown
from fastgen_operator.status.scheduler_words import is_about_volume

MODEL_CACHED: Final = "ModelCached"

_REASONS: Final = {
    SOURCE_NOT_FOUND: "SourceNotFound",
    ACCESS_DENIED: "AccessDenied",
    VOLUME_FULL: "VolumeFull",
}
_REQUIRED: Final = (
    "set the labels and annotations that it requires in spec.podTemplate.metadata, and resources in "
    "spec.model.download.resources"
)
# A part of the API server's message when it rejects a pod, and the remedy; the first match counts. Source: the plugins
# in k8s.io/kubernetes/plugin/pkg/admission, and apiserver/pkg/admission/plugin. A test looks for these words in the API
# server that it runs.
REFUSALS: Final = (
    (
        "failed calling webhook",
        "repair or remove the webhook: see kubectl get mutatingwebhookconfigurations and "
        "validatingwebhookconfigurations",
    ),
    ("admission webhook", _REQUIRED),
    ("ValidatingAdmissionPolicy", _REQUIRED),
    ("must specify", "set these in spec.model.download.resources"),
    ("exceeded quota", "reduce spec.model.download.resources, or raise the quota"),
    ("insufficient quota", "ask for a quota that covers spec.scheduling.priorityClassName"),
    ("usage per", "correct spec.model.download.resources"),
    ("max limit to request ratio per", "set both in spec.model.download.resources, within the ratio"),
    ("violates PodSecurity", "correct spec.podTemplate, or the namespace's label"),
    ("PriorityClass", "correct spec.scheduling.priorityClassName"),
    ("runtimeClass.scheduling", "correct spec.scheduling.nodeSelector, or choose another runtimeClassName"),
    ("RuntimeClass", "correct spec.scheduling.runtimeClassName"),
    ("node label selector", "correct spec.scheduling.nodeSelector, or the namespace's annotations"),
    ("pod tolerations", "correct spec.scheduling.tolerations, or the namespace's annotations"),
    ("webhook backend", "use an image that it accepts in spec.engine.image"),
    ("does not reference that", "name the Secret in the ServiceAccount, too"),
    ("error looking up service account", "correct spec.podTemplate.spec.serviceAccountName"),
)
_REMEDIES: Final = {
    "SourceNotFound": "correct spec.model.source or spec.model.revision",
    "AccessDenied": "provide credentials with read access in the Secret named by spec.model.secretName",
    "VolumeFull": "raise spec.cache.size",
}
_MORE_DISK: Final = "run the pods on nodes with more free disk space, or set spec.cache to download to a volume"
_MORE_MEMORY: Final = "raise spec.model.download.resources.limits.memory"
_REQUEST_MEMORY: Final = "its node had no memory left: set spec.model.download.resources.requests.memory"
_NOT_PINNED: Final = (
    "its tag can change, so replicas may serve different weights: add the digest to spec.model.source (@sha256:…)"
)
_NAME_A_SECRET: Final = "create a Secret with credentials that have read access, and name it in spec.model.secretName"


def model_cached(situation: Situation) -> Condition:
    """Compute the condition ModelCached."""
    observed, spec = situation.observed, situation.spec
    source = urlsplit(spec.model.source)
    if (image := spec.model.image) is not None:
        words = f"no download by the operator: each node pulls the image {image} and keeps it"
        # A tag can move: pods that start later, or on other nodes, may then serve other weights.
        return true("NotNeeded", words if "@" in image else f"{words}; {_NOT_PINNED}")
    if not spec.model.is_downloaded:
        where = f"the PersistentVolumeClaim {source.netloc}" if source.scheme == "pvc" else "the engine container"
        return true("NotNeeded", f"no download: the model is a path in {where}")
    if spec.is_preloaded:
        if situation.is_cached or serves_model(situation):
            return true("Cached", f"{spec.model.source} is in the volume {observed.key[1]}")
        return _of_jobs(situation) or _of_pods(observed.fetch_pods, situation)
    if situation.desired_replicas == 0:
        return true("NotNeeded", "scaled to 0 replicas; each pod downloads the model when it starts")
    pods, model = observed.current_pods, spec.model.source
    if situation.canary is not None and situation.canary.outcome != "Promoted":
        model = "the model of the present revision"
    # A ready pod has the model, whatever has become of its init container.
    missing = [pod for pod in pods if not pod.is_ready and not pod.container(FETCH_CONTAINER).has_succeeded]
    if pods and not missing:
        return true("Cached", f"{len(pods)} of {len(pods)} pods have {model}")
    # PodsScheduled reports the others, and what to do.
    placed = [pod for pod in missing if not _waits_for_node(pod)]
    if missing and not placed:
        words = f"{len(missing)} of {len(pods)} pods download {model} when they have a node"
        rest = unknown("Downloading", words)
    else:
        rest = _of_pods(placed, situation)
    having = len(pods) - len(missing)
    if rest.status == "Unknown" and spec.has_minimum(having):
        return true("Cached", f"{having} of {len(pods)} pods have {model}; {rest.message}")
    return rest


def _of_jobs(situation: Situation) -> Condition | None:
    """Return the condition of a download that has no pod, else None.

    It is suspended, its pod is rejected, or something else than the operator has ended it.
    """
    for job in situation.observed.jobs:
        if job.is_suspended:
            remedy = f'run kubectl patch job {job.name} --type=merge --patch \'{{"spec": {{"suspend": false}}}}\''
            if job.is_queued:
                remedy = queue_message(job)
            return _false("JobSuspended", f"Job {job.name} is suspended", remedy)
        if (failure := situation.failures.get(job.name)) is not None:
            remedy = next((remedy for part, remedy in REFUSALS if part in failure.message), "")
            return _false(failure.reason, failure.message, remedy)
        if (words := job.failure) is not None:
            remedy = f"run kubectl delete job {job.name} to start the download again; it continues where it ended"
            return _false("DownloadFailed", f"Job {job.name} was ended: {words}", remedy)
    return None


def _of_pods(pods: Iterable[Pod], situation: Situation) -> Condition:
    """Return the condition of the first failed download pod, else of the first pod."""
    pods = tuple(pods)
    # Evicted pods stay for days beside the pod that goes on.
    ended = [pod for pod in pods if pod.phase == "Failed" and not pod.is_terminating]
    said = [_of_pod(pod, situation) for pod in pods if not pod.is_terminating and pod not in ended]
    leaving = [pod for pod in pods if pod.is_terminating and pod.node]
    if not said and leaving:
        # The Job starts no other pod before it has ended: both would write the same files.
        words = leaving[0].termination_message(situation.now)
        if leaving[0].is_overdue(situation.now):
            return _false("DownloadFailed", words)
        return unknown("Downloading", f"the next attempt waits: {words}")
    if not said and ended:
        last = max(ended, key=lambda pod: (pod.created, pod.name))
        return _false("DownloadFailed", f"{last.end}; the next pod continues the download")
    none = unknown("Downloading", "the download has no pod yet")
    return next((each for each in said if each.status == "False"), said[0] if said else none)


def _of_pod(pod: Pod, situation: Situation) -> Condition:
    observed, spec = situation.observed, situation.spec
    name = pod.name
    if (known := situation.failures.get(name)) is not None:
        return _false(known.reason, known.message)
    if (words := pod.unschedulable) is not None:
        if is_about_volume(words):
            if spec.cache is None:
                remedy = "check the claims that spec.podTemplate mounts, and kubectl describe pvc"
                return _false("VolumeNotBound", f"pod {name} waits for a volume: {words}", remedy)
            remedy = "check spec.cache.storageClassName, and kubectl describe pvc"
            return _false("VolumeNotBound", f"pod {name} waits for the volume {observed.key[1]}: {words}", remedy)
        if nodes := situation.volume_nodes(observed.pods):
            place = f"on node {nodes[0]}, where the replicas hold the ReadWriteOnce volume {observed.key[1]}"
            remedy = "make room on that node, or remove spec.cache and add it again with accessMode ReadWriteMany"
            return _false(VOLUME_ON_ONE_NODE, f"pod {name} cannot be scheduled: {words}; it must run {place}", remedy)
        return _false("Unschedulable", f"pod {name} cannot be scheduled: {words}")
    if (words := pod.gate) is not None:
        return _false("SchedulingGated", f"pod {name}: {words}")
    fetch = pod.container(FETCH_CONTAINER)
    ended, words = fetch.ended, fetch.waiting_message
    if fetch.waiting == "CreateContainerConfigError":
        if not words.startswith("secret "):
            return _false("DownloadFailed", f"pod {name}: {words}")
        field = "spec.model.secretName" if f'"{spec.model.secret_name}"' in words else "spec.podTemplate"
        return _false("SecretNotFound", f"pod {name}: {words}", f"create it, or correct {field}")
    if fetch.waiting in IMAGE_PULL_REASONS:
        return _false("DownloadFailed", f"pod {name}: the image {fetch.image} cannot be pulled: {words}")
    if pod.is_silent:
        words = f"pod {name}: its node {pod.node} does not respond"
        return unknown("Downloading", words)
    has_not_started = ended is None and not fetch.is_running
    if pod.is_download and has_not_started and (other := failure_of(pod, situation.now)) is not None:
        # The fetch container cannot be created, or another one, such as a sidecar, keeps it from starting.
        return _false("DownloadFailed", other.message)
    if fetch.is_running and (ended is None or ended.exit_code == 0):
        return unknown("Downloading", f"pod {name} is downloading {spec.model.source}")
    if ended is None:
        return unknown("Downloading", f"the download of {spec.model.source} has not started; {state_of(pod)}")
    if ended.exit_code == 0:
        return unknown("Downloading", f"pod {name} has downloaded {spec.model.source}, and has not ended yet")
    exit_code = f"exit code {ended.exit_code} ({ended.reason})"
    last = ended.last_line.removeprefix("fastgen: error: ") or exit_code
    if fetch.is_running:
        attempt = f"attempt {fetch.restarts + 1}; the previous one failed: {last}"
        message = f"pod {name} is downloading {spec.model.source}, {attempt}"
        return unknown("Downloading", message)
    reason = _REASONS.get(ended.exit_code or 0, "DownloadFailed")
    remedy = _REMEDIES.get(reason, "")
    if ended.reason == "OOMKilled":
        remedy = _MORE_MEMORY if fetch.memory_limit else _REQUEST_MEMORY
    elif reason == "AccessDenied" and spec.model.secret_name is None:
        remedy = _NAME_A_SECRET
    elif reason == "VolumeFull":
        remedy = _MORE_DISK if spec.cache is None else _pending_growth(observed) or remedy
    return _false(reason, last, remedy)


def _pending_growth(observed: Observed) -> str | None:
    """Return words about a volume that is smaller than its claim requests; None if it is not."""
    claim = observed.claim
    if claim is None or not claim.capacity or (quantity(claim.capacity) or 0) >= (quantity(claim.size) or 0):
        return None
    return (
        f"the volume {claim.name} has not grown from {claim.capacity} to {claim.size} yet: if it does not, see "
        f"kubectl describe pvc {claim.name}"
    )


def _waits_for_node(pod: Pod) -> bool:
    """Return whether the pod gets no node, for another reason than a claim without a volume."""
    words = pod.unschedulable
    return pod.gate is not None or (words is not None and not is_about_volume(words))


def _false(reason: str, message: str, remedy: str = "") -> Condition:
    return false(reason, f"{message}: {remedy}" if remedy else message)
