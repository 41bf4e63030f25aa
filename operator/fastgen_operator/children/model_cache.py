"""The model cache: a PersistentVolumeClaim, and the Job that downloads the model into it.

The Job has a single pod, whose container the kubelet restarts until it succeeds, with exponential back-off of at most
five minutes. Each attempt resumes the download, and picks up a corrected Secret or a grown volume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from fastgen_operator.api import PodTemplate
from fastgen_operator.api.model import Cache
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.download_placement import ANYWHERE, Placement
from fastgen_operator.children.model_volume import SCRATCH_VOLUME, disposable_volumes, fetch_container, model_files
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import (
    CACHED_ANNOTATION,
    CLAIM_ANNOTATION,
    FETCH_ANNOTATION,
    MODEL_ANNOTATION,
)
from fastgen_operator.objects.container import ENGINE_CONTAINER
from fastgen_operator.objects.stored import fingerprint

# The download runs where the engines will: a volume can be bound to the node or zone of its first consumer. The
# affinity includes the co-location with the engines that a ReadWriteOnce volume needs. Names are resolved alike, too.
_PLACEMENT: Final = (
    *("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName", "imagePullSecrets"),
    *("serviceAccountName", "securityContext", "schedulerName", "dnsPolicy", "dnsConfig", "hostAliases"),
)
_FOR_EVER: Final = 2**31 - 1
# Characters of a hash in a name.
_HASH: Final = 10


def build_claim(desired: Desired, cache: Cache) -> Object:
    """Build the PersistentVolumeClaim, which is deleted with the resource."""
    record = desired.cached_model
    annotations = {} if record is None else {"annotations": {CACHED_ANNOTATION: record}}
    spec = {"accessModes": [cache.access_mode], "resources": {"requests": {"storage": desired.claim_size}}}
    storage_class = {"storageClassName": cache.storage_class_name} if cache.storage_class_name else {}
    return {"metadata": annotations, "spec": {**spec, **storage_class}}


def build_fetch_job(
    desired: Desired, engine_pod: Object, claim_uid: str, in_use: Iterable[str], placement: Placement = ANYWHERE
) -> Object:
    """Build the Job that downloads the model to the volume.

    A Job is immutable, so its name contains a hash of everything it depends on except `in_use`: pods that come and go
    must not restart a running download. The annotation `FETCH_ANNOTATION` has the hash without the placement.

    Args:
        engine_pod: spec of the pods that will serve the model.
        claim_uid: the uid of the live PersistentVolumeClaim.
        in_use: addresses of the models to keep. All others except the new one are removed from the volume.
        placement: where its pod may run.
    """
    spec, settings = desired.spec, desired.platform.pods
    address = spec.model.address
    image = next(each["image"] for each in engine_pod["containers"] if each["name"] == ENGINE_CONTAINER)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        **{field: engine_pod[field] for field in _PLACEMENT if field in engine_pod},
        "volumes": [SCRATCH_VOLUME, *model_files(desired).volumes, *settings.volumes],
    }
    annotations = {MODEL_ANNOTATION: address, CLAIM_ANNOTATION: claim_uid}
    wanted = (spec.pod_template or PodTemplate()).metadata
    # The metadata of the engine's pods, except the labels that select them.
    own = {**desired.labels, "app.kubernetes.io/name": "fastgen-fetch", **desired.fetch_selector}
    metadata = {
        "labels": {**wanted.labels, **desired.queue, **own},
        "annotations": {**disposable_volumes(pod), **wanted.annotations},
    }
    identity: list[Any] = [annotations, pod, metadata, fetch_container(desired, image)]
    fetch = fingerprint(identity)[:_HASH]
    name = fetch if placement == ANYWHERE else fingerprint([identity, asdict(placement)])[:_HASH]
    container = fetch_container(desired, image, keep=sorted({address, *in_use}))
    job = {
        "backoffLimit": _FOR_EVER,
        # Prevents two pods from writing the same files if a node is unreachable but still running.
        "podReplacementPolicy": "Failed",
        "template": {"metadata": metadata, "spec": placement.place({**pod, "containers": [container]})},
    }
    annotations = {**annotations, FETCH_ANNOTATION: fetch}
    about = {"name": f"{desired.name}-fetch-{name}", "labels": desired.queue, "annotations": annotations}
    return {"metadata": about, "spec": job}
