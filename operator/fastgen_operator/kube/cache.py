"""The watched objects of the cluster in memory, so that a visit in the steady state makes no request.

Three streams feed it, none of which waits for another: watch events, what the operator's own writes returned, and
lists. They agree by resource version, which grows with every write to objects of one kind (Kubernetes says so from
1.35 on, KEP-5504; etcd has always made it so): whatever comes late is older than what is there, and changes nothing.

kopf lists again where a watch broke, and says nothing of objects that vanished meanwhile: only `replace` finds those.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from fastgen_operator.kinds import FASTGEN, FETCH_SUFFIX, OWNER_LABEL, Key, Kind, Object
from fastgen_operator.kube.compact import compact

# Namespace and name.
_Place = tuple[str, str]
_EMPTY: Final[dict[str, Object]] = {}


class InformerCache:
    """Objects of some kinds; safe to use from several threads.

    What it gives is shared by all readers: never change it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shelves: dict[Kind, _Shelf] = {}

    def put(self, kind: Kind, obj: Object) -> None:
        """Takes an object in, unless a newer state of it, or its end, is known."""
        trimmed = compact(kind, obj)
        with self._lock:
            self._shelf(kind).put(trimmed)

    def remove(self, kind: Kind, obj: Object) -> None:
        """The object is gone; its resource version is that of its deletion, or the last one known."""
        with self._lock:
            self._shelf(kind).remove(_place(obj), _version(obj))

    def replace(self, kind: Kind, namespace: str | None, objects: Iterable[Object], version: str) -> set[Key]:
        """Takes in a whole list, made at that version; `namespace` is None for one of all namespaces.

        Returns the FastGenDeployments about which the cache was wrong: they are to be visited.
        """
        trimmed = [compact(kind, obj) for obj in objects]
        with self._lock:
            changed = self._shelf(kind).replace(namespace, trimmed, int(version))
        return {key for obj in changed if (key := owner_of(kind, obj)) is not None}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        with self._lock:
            return self._shelf(kind).objects.get((namespace, name))

    def owned(self, kind: Kind, key: Key) -> list[Object]:
        """The objects of that kind with the owner label of one FastGenDeployment, by name."""
        with self._lock:
            return [obj for _, obj in sorted(self._shelf(kind).by_owner.get(key, _EMPTY).items())]

    def resources(self) -> list[Key]:
        """Every FastGenDeployment."""
        with self._lock:
            return list(self._shelf(FASTGEN).objects)

    def size(self) -> int:
        """How many objects are held."""
        with self._lock:
            return sum(len(shelf.objects) for shelf in self._shelves.values())

    def _shelf(self, kind: Kind) -> _Shelf:
        return self._shelves.setdefault(kind, _Shelf(kind))


class _Shelf:
    """The objects of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.objects: dict[_Place, Object] = {}
        self.by_owner: dict[Key, dict[str, Object]] = {}
        # When something ended, by place: what still comes of it is older. Forgotten once a list has the same to say.
        self._ends: dict[_Place, int] = {}
        # The version of the last list, by namespace: what is older, and not here, is gone.
        self._listed: dict[str | None, int] = {}

    def put(self, obj: Object) -> bool:
        """Whether it was news."""
        place, version = _place(obj), _version(obj)
        before = self.objects.get(place)
        if version <= (self._end_of(place) if before is None else _version(before)):
            return False
        self._drop(place)
        self.objects[place] = obj
        if (owner := owner_of(self._kind, obj)) is not None:
            self.by_owner.setdefault(owner, {})[place[1]] = obj
        return True

    def remove(self, place: _Place, version: int) -> None:
        before = self.objects.get(place)
        if before is not None and _version(before) > version:
            return
        self._ends[place] = max(version, self._ends.get(place, 0))
        self._drop(place)

    def replace(self, namespace: str | None, listed: list[Object], version: int) -> list[Object]:
        """The objects that were news: new, newer or gone."""
        if version < self._listed.get(namespace, 0):
            self._forget(namespace)
        present = {_place(obj) for obj in listed}
        gone = [
            obj
            for place, obj in self.objects.items()
            if place not in present and namespace in (None, place[0]) and _version(obj) <= version
        ]
        for obj in gone:
            self.remove(_place(obj), version)
        news = [obj for obj in listed if self.put(obj)]
        self._listed[namespace] = version
        self._ends = {
            place: end for place, end in self._ends.items() if end > version or namespace not in (None, place[0])
        }
        return gone + news

    def _end_of(self, place: _Place) -> int:
        """Up to this version nothing is left of what may have been in that place."""
        return max(self._ends.get(place, 0), self._listed.get(None, 0), self._listed.get(place[0], 0))

    def _forget(self, namespace: str | None) -> None:
        """The server went back in time, as after a restored backup: what was known is of another future."""
        for place in [place for place in self.objects if namespace in (None, place[0])]:
            self._drop(place)
        self._ends = {place: end for place, end in self._ends.items() if namespace not in (None, place[0])}
        del self._listed[namespace]

    def _drop(self, place: _Place) -> None:
        before = self.objects.pop(place, None)
        if before is not None and (owner := owner_of(self._kind, before)) is not None:
            siblings = self.by_owner[owner]
            del siblings[place[1]]
            if not siblings:
                del self.by_owner[owner]


def owner_of(kind: Kind, obj: Object) -> Key | None:
    """The FastGenDeployment that an object is, or is labelled to belong to."""
    namespace, name = _place(obj)
    if kind == FASTGEN:
        return namespace, name
    label = obj["metadata"].get("labels", {}).get(OWNER_LABEL)
    return None if label is None else (namespace, str(label).removesuffix(FETCH_SUFFIX))


def _place(obj: Object) -> _Place:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])
