"""Co-location: all pods that mount a ReadWriteOnce volume run on the one node that it is attached to.

The scheduler does not know where such a volume is attached, and places pods on nodes that cannot mount it. So each pod
requires the node of the others. The first pod meets its own requirement and may run anywhere.
"""

from __future__ import annotations

from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import FETCH_SUFFIX, OWNER_LABEL

# Reason of conditions: a pod waits, because the node that has the volume does not accept it.
VOLUME_ON_ONE_NODE: Final = "VolumeOnOneNode"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


class ColocationError(ValueError):
    """The pods' affinity cannot be combined with co-location; the message names the field and the remedy."""


def colocate(name: str, pod: Object) -> Object:
    """Return the pod spec with the requirement to run where other pods of the resource `name` run.

    Raises:
        ColocationError: the affinity or its podAffinity is not a map, or has required terms of its own. The scheduler
            looks for a single pod that matches all required terms, so it would find none.
    """
    affinity = _as_map(pod.get("affinity"), "affinity")
    near = _as_map(affinity.get("podAffinity"), "affinity.podAffinity")
    if near.get(_REQUIRED):
        raise ColocationError(
            f"affinity.podAffinity.{_REQUIRED}: must not be set, because all pods already require the node of the "
            "ReadWriteOnce volume, and the scheduler wants one pod that matches all required terms: use a preferred "
            "term or nodeAffinity, or spec.cache.accessMode ReadWriteMany"
        )
    both = {"key": OWNER_LABEL, "operator": "In", "values": [name, f"{name}{FETCH_SUFFIX}"]}
    term = {"labelSelector": {"matchExpressions": [both]}, "topologyKey": "kubernetes.io/hostname"}
    return {**pod, "affinity": {**affinity, "podAffinity": {**near, _REQUIRED: [term]}}}


def _as_map(value: Any, path: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ColocationError(f"{path}: must be a map")
    return value or {}
