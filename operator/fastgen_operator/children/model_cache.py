"""The model cache: a volume, and the Job that downloads into it.

The Job starts its one pod's container again for as long as it fails, with the kubelet's growing back-off (at most five
minutes): what was downloaded stays, a token or a volume that was put right is found by the next try, and there are
never more pods than one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Final

from fastgen_operator.api import Spec
from fastgen_operator.api.model import Cache
from fastgen_operator.children.metadata import child, fetch_labels, selector
from fastgen_operator.children.model_source import fetch_container, model_address, model_volumes
from fastgen_operator.kinds import CLAIM, CLAIM_ANNOTATION, JOB, MODEL_ANNOTATION, Object
from fastgen_operator.pods import ENGINE_CONTAINER

# The download's pod goes where the engines will: a volume may be bound to the node or zone of the first that uses it.
_PLACEMENT: Final = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
    "runtimeClassName",
    "imagePullSecrets",
    "serviceAccountName",
    "securityContext",
)
_FOR_EVER: Final = 2**31 - 1


def build_claim(owner: Object, cache: Cache) -> Object:
    """The volume of the resource; it goes with the resource."""
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return child(CLAIM, owner, spec)


def build_fetch_job(owner: Object, spec: Spec, engine_pod: Object, claim: Object, in_use: Iterable[str]) -> Object:
    """The Job that downloads the spec's model into the claim.

    `engine_pod` is the spec of the pods that will serve it; `in_use` are the addresses of models that pods use now:
    what is neither of these nor the new one is removed from the volume. The Job's name tells apart all that it depends
    on but those: a Job cannot be changed, and one that runs need not know who came or went meanwhile.
    """
    name, address = owner["metadata"]["name"], model_address(spec)
    image = next(container["image"] for container in engine_pod["containers"] if container["name"] == ENGINE_CONTAINER)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        **{field: engine_pod[field] for field in _PLACEMENT if field in engine_pod},
        **_affinity(name, spec, engine_pod),
        "volumes": [{"name": "tmp", "emptyDir": {}}, *model_volumes(name, spec)],
    }
    annotations = {MODEL_ANNOTATION: address, CLAIM_ANNOTATION: claim["metadata"]["uid"]}
    job = child(
        JOB,
        owner,
        {
            "backoffLimit": _FOR_EVER,
            # Two would write the same files where a node is lost that still runs.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": fetch_labels(name)}, "spec": pod},
        },
    )
    container = {"resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}}
    identity = json.dumps([annotations, pod, fetch_container(spec, image)], sort_keys=True)
    job["metadata"]["name"] = f"{name}-fetch-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"
    job["metadata"]["annotations"] = annotations
    pod["containers"] = [fetch_container(spec, image, keep=sorted({address, *in_use})) | container]
    return job


def _affinity(name: str, spec: Spec, engine_pod: Object) -> dict[str, Any]:
    """A volume that is on one node at a time: the download had better run where the engines have it."""
    assert spec.cache is not None, "there is a Job only where there is a cache"
    if spec.cache.access_mode != "ReadWriteOnce":
        return {}
    affinity: dict[str, Any] = deepcopy(engine_pod.get("affinity") or {})
    near = {"labelSelector": {"matchLabels": selector(name)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = affinity.setdefault("podAffinity", {}).setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
    preferred.append({"weight": 100, "podAffinityTerm": near})
    return {"affinity": affinity}
