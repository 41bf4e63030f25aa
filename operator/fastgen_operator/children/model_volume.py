"""The model in a pod: volumes, mounts and the container that downloads it, by its source and `spec.cache`.

    file://                               in the image, or in a volume of spec.podTemplate: nothing is added
    pvc://                                the claim is mounted
    oci://                                the image is mounted, and the kubelet keeps it on the node
    downloaded, no spec.cache             an init container downloads to the pod's own emptyDir
    downloaded, spec.cache, no preload    an init container downloads to the volume, unless the model is there
    downloaded, spec.cache                a Job downloads to the volume before pods are created: see `model_cache.py`

The engine mounts the model read-only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from fastgen_operator.api.model import DEFAULT_REVISION
from fastgen_operator.children.desired import Desired
from fastgen_operator.objects.container import FETCH_CONTAINER

MODELS_PATH: Final = "/mnt/models"
VOLUME: Final = "models"
# Both requests and limits, because a ResourceQuota may require either of every container. The download is one process
# that is bound by the network, and that keeps no file in memory.
_RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}
# Security context of every container, as the restricted Pod Security Standard requires.
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
# Volume of /tmp, bounded so that a runaway process ends its pod and not the node.
SCRATCH_VOLUME: Final = {"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}}
# Source: kubernetes/autoscaler, cluster-autoscaler/FAQ.md.
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Volumes and mounts with which the engine's container reaches the model.

    Attributes:
        path: path of the model's folder or GGUF file in the container.
    """

    path: str
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]


def model_files(desired: Desired) -> ModelFiles:
    """Return where the pods find the model."""
    model = desired.spec.model
    source = urlsplit(model.source)
    if source.scheme == "file":
        return ModelFiles(model.source.removeprefix("file://"), [], [])
    mount = {"name": VOLUME, "mountPath": MODELS_PATH, "readOnly": True}
    if model.image is not None:
        path = f"{MODELS_PATH}{model.path_in_image}".rstrip("/")
        # pullPolicy is left to Kubernetes: Always for the tag latest and for no tag, else IfNotPresent.
        return ModelFiles(path, [{"name": VOLUME, "image": {"reference": model.image}}], [mount])
    path, claim = f"{MODELS_PATH}{source.path.rstrip('/')}", source.netloc
    if model.is_downloaded:
        name = source.path.rpartition("/")[2]
        folder, claim = f"{MODELS_PATH}/{model.address}", desired.name
        path = f"{folder}/{name}" if name.endswith(".gguf") else folder
    is_own = model.is_downloaded and desired.spec.cache is None
    place: dict[str, Any] = {"emptyDir": {}} if is_own else {"persistentVolumeClaim": {"claimName": claim}}
    return ModelFiles(path, [{"name": VOLUME, **place}], [mount])


def fetch_container(desired: Desired, image: str, keep: Sequence[str] = ()) -> dict[str, Any]:
    """Return the container that downloads the model.

    The credentials are in the environment of this container only: the engine does not need them.

    Args:
        keep: addresses of models to keep; all others are first removed from the volume. If empty, none is removed.
    """
    model, settings = desired.spec.model, desired.platform.pods
    given = model.download.resources if model.download is not None else None
    folder, revision = f"{MODELS_PATH}/{model.address}", model.revision or DEFAULT_REVISION
    kept = [word for address in keep for word in ("--keep", address)]
    return {
        "name": FETCH_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["fetch", model.source, "--to", folder, "--revision", revision, *kept],
        "env": [{"name": "HOME", "value": "/tmp"}, *settings.environment],
        **({"envFrom": [{"secretRef": {"name": model.secret_name}}]} if model.secret_name else {}),
        **(resources(**_RESOURCES) if given is None else resources(given.requests, given.limits)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": VOLUME, "mountPath": MODELS_PATH},
            *settings.mounts,
        ],
    }


def resources(requests: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container's field `resources`, with quantities as text; empty if there are none."""
    kinds = {"requests": requests, "limits": limits}
    given = {kind: {name: str(value) for name, value in values.items()} for kind, values in kinds.items() if values}
    return {"resources": given} if given else {}


def disposable_volumes(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotation that lets the cluster autoscaler evict the pod in spite of its emptyDirs."""
    names = [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume]
    return {SAFE_TO_EVICT: ",".join(names)}
