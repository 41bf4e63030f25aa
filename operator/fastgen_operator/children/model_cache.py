"""The model cache: a PersistentVolumeClaim, and the Job that downloads the model into it.

The Job has a single pod, whose container the kubelet restarts until it succeeds, with exponential back-off of at most
five minutes. Each attempt resumes the download, and picks up a corrected Secret or a grown volume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from fastgen_operator.api import PodTemplate, Spec
from fastgen_operator.api.model import Cache
from fastgen_operator.children.metadata import (
    child,
    disposable_volumes,
    fetch_labels,
    labels,
    queue_labels,
    scratch_volume,
    without_empty,
)
from fastgen_operator.children.model_source import fetch_container, model_address, model_volumes
from fastgen_operator.children.placement import ANYWHERE, Placement
from fastgen_operator.children.platform import PodSettings
from fastgen_operator.kinds import CLAIM, CLAIM_ANNOTATION, FETCH_ANNOTATION, JOB, MODEL_ANNOTATION, Object
from fastgen_operator.pods import ENGINE_CONTAINER

# The download runs where the engines will: a volume can be bound to the node or zone of its first consumer. The
# affinity includes the co-location with the engines that a ReadWriteOnce volume needs. Names are resolved alike, too.
_PLACEMENT: Final = (
    *("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName", "imagePullSecrets"),
    *("serviceAccountName", "securityContext", "schedulerName", "dnsPolicy", "dnsConfig", "hostAliases"),
)
_FOR_EVER: Final = 2**31 - 1


def build_claim(owner: Object, cache: Cache) -> Object:
    """Build the PersistentVolumeClaim, which is deleted with the resource."""
    spec = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
        **without_empty({"storageClassName": cache.storage_class_name}),
    }
    return child(CLAIM, owner, {"spec": spec})


def build_fetch_job(
    owner: Object,
    spec: Spec,
    settings: PodSettings,
    engine_pod: Object,
    claim: Object,
    in_use: Iterable[str],
    placement: Placement = ANYWHERE,
) -> Object:
    """Build the Job that downloads the spec's model into the claim.

    A Job is immutable, so its name contains a hash of everything it depends on except `in_use`: pods that come and go
    must not restart a running download. The annotation `FETCH_ANNOTATION` has the hash without the placement.

    Args:
        engine_pod: spec of the pods that will serve the model.
        claim: the live PersistentVolumeClaim.
        in_use: addresses of the models that pods use now. All other models except the new one are removed from the
            volume.
        placement: where its pod may run.
    """
    name, address = owner["metadata"]["name"], model_address(spec)
    image = next(container["image"] for container in engine_pod["containers"] if container["name"] == ENGINE_CONTAINER)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        **{field: engine_pod[field] for field in _PLACEMENT if field in engine_pod},
        "volumes": [scratch_volume(), *model_volumes(name, spec), *settings.volumes],
    }
    annotations = {MODEL_ANNOTATION: address, CLAIM_ANNOTATION: claim["metadata"]["uid"]}
    template, queue = (spec.pod_template or PodTemplate()).metadata, queue_labels(owner, spec)
    # The metadata of the engine's pods, except the labels that select them.
    names = {**template.labels, **queue, **fetch_labels(name)}
    metadata = {"labels": names, "annotations": {**disposable_volumes(pod), **template.annotations}}
    identity: list[Any] = [annotations, pod, metadata, fetch_container(spec, image, settings)]
    fetch = _hash(identity)
    job_name = f"{name}-fetch-{fetch if placement == ANYWHERE else _hash([identity, asdict(placement)])}"
    container = fetch_container(spec, image, settings, keep=sorted({address, *in_use}))
    fields = {
        "backoffLimit": _FOR_EVER,
        # Prevents two pods from writing the same files if a node is unreachable but still running.
        "podReplacementPolicy": "Failed",
        "template": {"metadata": metadata, "spec": placement.place({**pod, "containers": [container]})},
    }
    more = {"labels": {**queue, **labels(name)}, "annotations": {**annotations, FETCH_ANNOTATION: fetch}}
    return child(JOB, owner, {"spec": fields}, name=job_name, **more)


def _hash(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
