"""Informer cache: the watched objects in memory.

With it a reconcile in the steady state makes no request. Watch events, results of the operator's own writes and lists
update it concurrently. Resource versions order them: they grow with every write to objects of one kind (guaranteed
since Kubernetes 1.35, KEP-5504; always true with etcd). An update that arrives late is older than the cached object and
changes nothing.

A watch that is opened again does not report objects that were deleted meanwhile: only `replace` finds them.

No object stops the cache: one that cannot be reduced is kept as a stub (`kube/compact.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from fastgen_operator.kinds import FASTGEN, POD, Key, Kind, Object
from fastgen_operator.kube.compact import EXPOSED_MODEL, compact, pack, stub
from fastgen_operator.labels_and_annotations import (
    CANARY_LABEL_SUFFIX,
    FETCH_SUFFIX,
    HEADROOM_LABEL_SUFFIX,
    OWNER_LABEL,
)
from fastgen_operator.objects.pod import Pod
from fastgen_operator.objects.stored import version_of

logger = logging.getLogger(__name__)


class InformerCache:
    """Objects of several kinds; safe to use from several threads.

    All readers share the returned objects: never modify them. Large ones are packed: see `compact.unpack`.

    Args:
        handles: returns whether this operator handles a FastGenDeployment. Of others only a stub is kept.
    """

    def __init__(self, handles: Callable[[Object], bool] = lambda _: True) -> None:
        self._handles = handles
        self._lock = threading.Lock()
        self._stores: dict[Kind, _Store] = {}

    def put(self, kind: Kind, obj: Object) -> None:
        """Store an object, unless the same or a newer version of it, or its deletion, is known."""
        if self._known(kind, obj) is not None:
            return
        trimmed = self._reduced(kind, obj)
        with self._lock:
            self._store(kind).put(trimmed)

    def correct(self, kind: Kind, obj: Object) -> None:
        """Store the answer to a write that changed nothing, in place of the cached object of the same version.

        The write was planned because the cached object differs from what is stored: it was read while its CRD had
        fewer fields. No later event would tell.
        """
        trimmed = self._reduced(kind, obj)
        with self._lock:
            self._store(kind).correct(trimmed)

    def remove(self, kind: Kind, obj: Object) -> None:
        """Remove a deleted object; its resource version is that of the deletion, or the last one known."""
        with self._lock:
            self._store(kind).remove(_key(obj), version_of(obj))

    def replace(self, kind: Kind, namespace: str | None, objects: Iterable[Object], version: str) -> set[Key]:
        """Replace the objects of a kind with a list made at that version. Newer cached objects stay.

        Args:
            namespace: None for a list of all namespaces.

        Returns:
            The FastGenDeployments for which the cache was wrong: they have to be reconciled.
        """
        trimmed = [self._known(kind, obj) or self._reduced(kind, obj) for obj in objects]
        with self._lock:
            changed = self._store(kind).replace(namespace, trimmed, int(version))
        return {key for obj in changed if (key := owner_of(kind, obj)) is not None}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the object, or None."""
        with self._lock:
            return self._store(kind).objects.get((namespace, name))

    def owned(self, kind: Kind, key: Key) -> list[Object]:
        """Return the objects of that kind with the owner label of one FastGenDeployment, by name."""
        with self._lock:
            return [obj for _, obj in sorted(self._store(kind).by_owner.get(key, {}).items())]

    def pods(self, key: Key) -> list[Pod]:
        """Return the pods with the owner label of one FastGenDeployment, those of downloads included, by name.

        Each version of a pod is one `Pod` for as long as it is cached, so that later reconciles do not read it again.
        """
        with self._lock:
            store = self._store(POD)
            return [store.pods[key[0], name] for name in sorted(store.by_owner.get(key, {}))]

    def resources(self) -> list[Key]:
        """Return the keys of all FastGenDeployments, including those that other operators handle."""
        with self._lock:
            return list(self._store(FASTGEN).objects)

    def holder(self, resource: Object) -> Key | None:
        """Return the FastGenDeployment to which the gateway routes requests for the model name of this one.

        None if the gateway does not route to this one. Of several with the same name, the oldest has it, whatever its
        operator. The gateway has the same rule.
        """
        with self._lock:
            return self._store(FASTGEN).holder(resource.get(EXPOSED_MODEL))

    def size(self) -> int:
        """Return the number of cached objects."""
        with self._lock:
            return sum(len(store.objects) for store in self._stores.values())

    def _reduced(self, kind: Kind, obj: Object) -> Object:
        try:
            if kind == FASTGEN and not self._handles(obj):
                return stub(kind, obj)
            return pack(kind, compact(kind, obj))
        except Exception as error:
            logger.exception("%s %s/%s cannot be read", kind.name, *_key(obj))
            return stub(kind, obj, f"an unexpected value ({type(error).__name__}: {error}): correct it")

    def _known(self, kind: Kind, obj: Object) -> Object | None:
        """Return the cached object if it has the same version, as for most of a list and the operator's own writes."""
        with self._lock:
            cached = self._store(kind).objects.get(_key(obj))
        return cached if cached is not None and version_of(cached) == version_of(obj) else None

    def _store(self, kind: Kind) -> _Store:
        return self._stores.get(kind) or self._stores.setdefault(kind, _Store(kind))


class _Store:
    """The objects of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.objects: dict[Key, Object] = {}
        self.by_owner: dict[Key, dict[str, Object]] = {}
        self.pods: dict[Key, Pod] = {}
        # Creation times of FastGenDeployments that the gateway routes to, by the name of the model.
        self._exposed: dict[str, dict[Key, str]] = {}
        # Versions of deletions, to ignore late updates. Dropped when a newer list makes them redundant.
        self._deleted: dict[Key, int] = {}
        # Version of the last list, by namespace: an older object that is not cached has been deleted.
        self._listed: dict[str | None, int] = {}

    def put(self, obj: Object) -> bool:
        """Store the object; return whether it was new or newer."""
        key, version = _key(obj), version_of(obj)
        before = self.objects.get(key)
        if version <= (self._deleted_until(key) if before is None else version_of(before)):
            return False
        self._set(key, obj)
        return True

    def correct(self, obj: Object) -> None:
        """Replace the object if it has the same version."""
        before = self.objects.get(_key(obj))
        if before is not None and version_of(before) == version_of(obj):
            self._set(_key(obj), obj)

    def remove(self, key: Key, version: int) -> None:
        before = self.objects.get(key)
        if before is not None and version_of(before) > version:
            return
        self._deleted[key] = max(version, self._deleted.get(key, 0))
        self._drop(key)

    def replace(self, namespace: str | None, listed: list[Object], version: int) -> list[Object]:
        """Replace the objects of a namespace (None: all) with a list; return those added, updated or removed.

        Cached objects newer than the list stay. If the list is older than the previous one, all objects are replaced,
        and only those of the list are returned.
        """
        went_backwards = version < self._listed.get(namespace, 0)
        present = {_key(obj) for obj in listed}
        gone = [
            obj
            for key, obj in self.objects.items()
            if key not in present and namespace in (None, key[0]) and (went_backwards or version_of(obj) <= version)
        ]
        if went_backwards:
            self._forget(namespace)
        for obj in gone:
            self.remove(_key(obj), version)
        updated = [obj for obj in listed if self.put(obj)]
        self._listed[namespace] = version
        self._deleted = {
            key: end for key, end in self._deleted.items() if end > version or namespace not in (None, key[0])
        }
        return gone + updated

    def holder(self, model: str | None) -> Key | None:
        """Return the oldest FastGenDeployment that the gateway routes to for a model's name, or None."""
        exposed = self._exposed.get(model or "", {})
        return min(exposed, key=lambda key: (exposed[key], key), default=None)

    def _deleted_until(self, key: Key) -> int:
        """Return the version up to which an object of that key is known to be deleted."""
        return max(self._deleted.get(key, 0), self._listed.get(None, 0), self._listed.get(key[0], 0))

    def _forget(self, namespace: str | None) -> None:
        """Drop the objects of a namespace: versions went backwards, as after a restore of etcd from a backup."""
        for key in [key for key in self.objects if namespace in (None, key[0])]:
            self._drop(key)
        self._deleted = {key: end for key, end in self._deleted.items() if namespace not in (None, key[0])}
        del self._listed[namespace]

    def _set(self, key: Key, obj: Object) -> None:
        self._drop(key)
        self.objects[key] = obj
        if (model := obj.get(EXPOSED_MODEL)) is not None:
            self._exposed.setdefault(model, {})[key] = obj["metadata"].get("creationTimestamp", "")
        if self._kind == POD:
            self.pods[key] = Pod(obj)
        if (owner := owner_of(self._kind, obj)) is not None:
            self.by_owner.setdefault(owner, {})[key[1]] = obj

    def _drop(self, key: Key) -> None:
        before = self.objects.pop(key, None)
        self.pods.pop(key, None)
        if before is not None and (model := before.get(EXPOSED_MODEL)) is not None:
            self._exposed[model].pop(key)
            if not self._exposed[model]:
                del self._exposed[model]
        if before is not None and (owner := owner_of(self._kind, before)) is not None:
            siblings = self.by_owner[owner]
            del siblings[key[1]]
            if not siblings:
                del self.by_owner[owner]


def owner_of(kind: Kind, obj: Object) -> Key | None:
    """Return the key of the FastGenDeployment that the object is, or that its owner label names."""
    namespace, name = _key(obj)
    if kind == FASTGEN:
        return namespace, name
    label = (obj["metadata"].get("labels") or {}).get(OWNER_LABEL)
    if label is None:
        return None
    for suffix in (FETCH_SUFFIX, CANARY_LABEL_SUFFIX, HEADROOM_LABEL_SUFFIX):
        label = str(label).removesuffix(suffix)
    return namespace, label


def _key(obj: Object) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
