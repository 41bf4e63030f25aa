"""Reads one FastGenDeployment and its children from the informer cache."""

from __future__ import annotations

from collections.abc import Iterable

from fastgen_operator.kinds import FASTGEN, FETCH_SUFFIX, OWNER_LABEL, POD, REPLICA_SET, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.plan.observed import Observed


def observe(cache: InformerCache, key: Key, kinds: Iterable[Kind]) -> Observed | None:
    """Read the resource and its children of those kinds; None if the resource is gone or being deleted.

    A resource that is being deleted needs nothing: the garbage collector follows the owner references.
    """
    resource = cache.get(FASTGEN, *key)
    if resource is None or resource["metadata"].get("deletionTimestamp"):
        return None
    pods = cache.owned(POD, key)
    return Observed(
        resource=resource,
        children={(kind, child["metadata"]["name"]): child for kind in kinds for child in cache.owned(kind, key)},
        replica_sets=tuple(cache.owned(REPLICA_SET, key)),
        pods=tuple(pod for pod in pods if not _is_download(pod)),
        fetch_pods=tuple(pod for pod in pods if _is_download(pod)),
    )


def _is_download(pod: Object) -> bool:
    return str(pod["metadata"]["labels"][OWNER_LABEL]).endswith(FETCH_SUFFIX)
