"""Reads one FastGenDeployment and its children from the informer cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fastgen_operator.kinds import FASTGEN, REPLICA_SET, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.compact import unpack
from fastgen_operator.plan.observed import Observed


def observe(cache: InformerCache, key: Key, kinds: Iterable[Kind], operator_class: str | None) -> Observed | None:
    """Return the resource, its children of `kinds`, its ReplicaSets and its pods, as they are in the cache.

    Returns:
        None if the resource is gone, is being deleted or is of another operator class.
    """
    resource = cache.get(FASTGEN, *key)
    if resource is None or not needs_reconciles(resource, operator_class):
        return None
    pods = cache.pods(key)
    return Observed(
        resource=resource,
        children={(kind, child["metadata"]["name"]): child for kind in kinds for child in cache.owned(kind, key)},
        replica_sets=tuple(cache.owned(REPLICA_SET, key)),
        pods=tuple(pod for pod in pods if not (pod.is_download or pod.is_canary or pod.is_placeholder)),
        fetch_pods=tuple(pod for pod in pods if pod.is_download),
        canary_pods=tuple(pod for pod in pods if pod.is_canary),
        name_holder=cache.holder(resource),
    )


def unpacked(observed: Observed) -> Observed:
    """Return what was observed with the large specs of the resource and its children, which the cache keeps packed."""
    children = {key: unpack(child) for key, child in observed.children.items()}
    return replace(observed, resource=unpack(observed.resource), children=children)


def needs_reconciles(resource: Object, operator_class: str | None) -> bool:
    """Return whether the resource is of this operator's class and not being deleted."""
    return resource["spec"].get("operatorClass") == operator_class and not resource["metadata"].get("deletionTimestamp")
