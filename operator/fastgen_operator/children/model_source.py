"""Volumes, mounts and init containers that a model source needs, by scheme and `spec.cache`.

    file://                               part of the image: nothing is added
    pvc://                                the claim is mounted
    downloaded, no spec.cache             an init container downloads to the pod's own emptyDir
    downloaded, spec.cache, no preload    an init container downloads to the volume, unless the model is there
    downloaded, spec.cache                a Job downloads to the volume before pods are created: see `model_cache.py`

The engine mounts the model read-only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from fastgen_operator.api import DOWNLOADED, Spec
from fastgen_operator.children.metadata import CONTAINER_SECURITY, resources, without_empty
from fastgen_operator.children.platform import PodSettings

MODELS_PATH: Final = "/mnt/models"
VOLUME: Final = "models"
FETCH_CONTAINER: Final = "fetch"
DEFAULT_REVISION: Final = "main"
# Both requests and limits, because a ResourceQuota may require either of every container. The download is one process
# that is bound by the network, and that keeps no file in memory.
_RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}


def is_downloaded(spec: Spec) -> bool:
    """Return whether the model is downloaded from a remote source."""
    return spec.model.source.startswith(DOWNLOADED)


def is_preloaded(spec: Spec) -> bool:
    """Return whether a Job downloads the model to a volume before pods are created for it."""
    return is_downloaded(spec) and spec.cache is not None and spec.cache.preload


def downloads_in_pods(spec: Spec) -> bool:
    """Return whether each pod downloads the model before its engine starts."""
    return is_downloaded(spec) and not is_preloaded(spec)


def model_address(spec: Spec) -> str:
    """Return the name of the folder for this source and revision."""
    revision = spec.model.revision or DEFAULT_REVISION
    return hashlib.sha256(f"{spec.model.source}\n{revision}".encode()).hexdigest()[:16]


def model_path(spec: Spec) -> str:
    """Return the path of the model folder or GGUF file inside the engine container."""
    source = urlsplit(spec.model.source)
    if source.scheme == "file":
        return spec.model.source.removeprefix("file://")
    if source.scheme == "pvc":
        return f"{MODELS_PATH}{source.path.rstrip('/')}"
    name = source.path.rpartition("/")[2]
    folder = f"{MODELS_PATH}/{model_address(spec)}"
    return f"{folder}/{name}" if name.endswith(".gguf") else folder


def model_volumes(name: str, spec: Spec) -> list[dict[str, Any]]:
    """Return the model volumes for the pods of the resource `name`."""
    source = urlsplit(spec.model.source)
    if source.scheme == "file":
        return []
    if source.scheme == "pvc":
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": source.netloc}}]
    if spec.cache is None:
        return [{"name": VOLUME, "emptyDir": {}}]
    return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": name}}]


def model_mounts(spec: Spec) -> list[dict[str, Any]]:
    """Return the engine container's mounts of the model."""
    if urlsplit(spec.model.source).scheme == "file":
        return []
    return [{"name": VOLUME, "mountPath": MODELS_PATH, "readOnly": True}]


def fetch_container(spec: Spec, image: str, settings: PodSettings, keep: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the container that downloads the model.

    The credentials are in the environment of this container only: the engine does not need them.

    Args:
        keep: addresses of models to keep; all others are first removed from the volume. None removes nothing.
    """
    revision = spec.model.revision or DEFAULT_REVISION
    kept = [word for address in keep or () for word in ("--keep", address)]
    secret = spec.model.secret_name
    given = spec.model.download.resources if spec.model.download is not None else None
    return {
        "name": FETCH_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": [
            *("fetch", spec.model.source, "--to", f"{MODELS_PATH}/{model_address(spec)}", "--revision", revision),
            *kept,
        ],
        "env": [{"name": "HOME", "value": "/tmp"}, *settings.environment],
        **without_empty({"envFrom": [{"secretRef": {"name": secret}}] if secret else []}),
        **(resources(**_RESOURCES) if given is None else resources(given.requests, given.limits)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": VOLUME, "mountPath": MODELS_PATH},
            *settings.mounts,
        ],
    }
