"""The cluster as a visit sees it: read from memory, written to the API server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from fastgen_operator.kinds import FASTGEN, OWNER_LABEL, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches, uid_of, version_of

Kinds = Callable[[], Iterable[Kind]]


class Server(Protocol):
    """The API server; `kube.Kube` is the real one."""

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        ...

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[str, Iterator[Object]]:
        """The version of the list, and all objects with those labels."""
        ...

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply; returns the live object."""
        ...

    def delete(self, kind: Kind, child: Object) -> None:
        """Deletes exactly this object, if it is still there."""
        ...

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replaces the resource's status; None where the resource is gone."""
        ...

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Sets annotations on exactly this object; returns it, or None where it is gone."""
        ...

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        """Records an Event; returns its name."""
        ...

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        """Counts what an Event tells."""
        ...


class CachedClient:
    """Reads the cache, writes the server, and shows its own writes to the next read at once.

    Args:
        kinds: gives all kinds that are read now, but for the FastGenDeployments themselves.
        scopes: the namespaces that are watched; (None,) for all.
    """

    def __init__(self, server: Server, cache: InformerCache, kinds: Kinds, scopes: Sequence[str | None]) -> None:
        self._server, self._cache = server, cache
        self._kinds, self._scopes = kinds, tuple(scopes)

    def relist(self, watches: Watches) -> set[Key]:
        """Reads everything anew, and tells it to `watches`; returns the resources about which the cache was wrong.

        Raises:
            KubeError: a list failed; the message says of what.
        """
        changed: set[Key] = set()
        for kind in (FASTGEN, *self._kinds()):
            versions: dict[str, int] = {}
            for namespace in self._scopes:
                try:
                    version, objects = self._server.list(kind, namespace, "" if kind == FASTGEN else OWNER_LABEL)
                    noted = _noting(versions, objects)
                    changed |= self._cache.replace(kind, namespace, noted, version)
                except KubeError as error:
                    raise KubeError(error.status, f"listing {kind.plural}: {error}", error.retry_after) from error
            watches.listed(kind, versions)
        return changed

    def resources(self) -> list[Key]:
        """Every FastGenDeployment."""
        return self._cache.resources()

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as last seen, if it is one that is watched."""
        return self._cache.get(kind, namespace, name)

    def owned(self, kind: Kind, key: Key) -> list[Object]:
        """The objects of that kind with the owner label of the resource, as last seen."""
        return self._cache.owned(kind, key)

    def look(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now, whoever it belongs to."""
        return self._server.get(kind, namespace, name)

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply; returns the live object."""
        live = self._server.apply(kind, manifest)
        self._cache.put(kind, live)
        return live

    def delete(self, kind: Kind, child: Object) -> None:
        """Deletes exactly this object, if it is still there."""
        self._server.delete(kind, child)
        # One that waits for a finalizer shows up again with its next, newer state.
        self._cache.remove(kind, child)

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replaces the resource's status; None where the resource is gone."""
        live = self._server.patch_status(resource, status)
        if live is not None:
            self._cache.put(FASTGEN, live)
        return live

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Sets annotations on exactly this object; returns it, or None where it is gone."""
        live = self._server.annotate(kind, obj, annotations)
        if live is not None:
            self._cache.put(kind, live)
        return live

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        """Records an Event; returns its name."""
        return self._server.create_event(resource, event)

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        """Counts what an Event tells."""
        self._server.count_event(resource, name, count, time)


def _noting(versions: dict[str, int], objects: Iterable[Object]) -> Iterator[Object]:
    """The objects as they are read; the version of each goes into `versions`."""
    for obj in objects:
        versions[uid_of(obj)] = version_of(obj)
        yield obj
