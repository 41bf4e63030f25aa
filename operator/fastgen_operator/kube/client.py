"""Reads and writes of objects on the API server. Nothing is written while another operator may lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

from fastgen_operator.kinds import EVENT, FASTGEN, FIELD_MANAGER, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics

# Objects in one page of a list: all pods of a large cluster in one response would be a hundred megabytes.
_PAGE = 500

# Query parameters of a request, in order.
Query = list[tuple[str, str]]


class KubeClient:
    """Reads live objects and writes them; safe to use from several threads. Writes are counted by kind.

    Args:
        cache: updated with the result of each write, so that the next read of the cache includes it.
        leads: returns whether this operator may write now; a write without leadership raises KubeError.
    """

    def __init__(self, server: ApiServer, cache: InformerCache, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._server = server
        self._cache = cache
        self._metrics = metrics
        self._leads = leads
        self._not_before = 0.0

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the live object, cached or not, or None."""
        try:
            found: Object = self._send("GET", kind.path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return found

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[str, Iterator[Object]]:
        """Return the list's resource version and an iterator over the objects that match the label selector.

        Args:
            namespace: None for all namespaces.

        Raises:
            KubeError: the API server failed. The iterator reads further pages, and raises it too.
        """
        query = [("limit", str(_PAGE))] + ([("labelSelector", selector)] if selector else [])
        first = self._send("GET", kind.path(namespace), query)
        return str(first["metadata"]["resourceVersion"]), self._items(kind, kind.path(namespace), query, first)

    def _items(self, kind: Kind, path: str, query: Query, page: Any) -> Iterator[Object]:
        while True:
            for item in page["items"]:
                # List items lack these two fields.
                yield {"apiVersion": kind.api_version, "kind": kind.name, **item}
            if not (more := page["metadata"].get("continue")):
                return
            page = self._send("GET", path, [*query, ("continue", more)])

    def plurals(self, group: str, version: str) -> frozenset[str]:
        """Return the plurals of that group and version; empty if the cluster does not serve it."""
        try:
            answer = self._send("GET", f"/apis/{group}/{version}")
        except KubeError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(resource["name"] for resource in answer["resources"])

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Apply the manifest as the operator's field manager, and return the live object."""
        metadata = manifest["metadata"]
        live: Object = self._write(
            "PATCH",
            kind.path(metadata["namespace"], metadata["name"]),
            [("fieldManager", FIELD_MANAGER), ("force", "true")],
            manifest,
            "application/apply-patch+yaml",
        )
        self._metrics.writes.labels(kind.name).inc()
        self._cache.put(kind, live)
        return live

    def delete(self, kind: Kind, child: Object) -> None:
        """Delete this object if it still exists, and its dependents in the background."""
        metadata = child["metadata"]
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            self._write("DELETE", path, body=body, content_type="application/json")
        except KubeError as error:
            # 409: the name belongs to another object now.
            if error.status not in (404, 409):
                raise
        else:
            self._metrics.writes.labels(kind.name).inc()
        # An object that waits for a finalizer returns to the cache with its next version.
        self._cache.remove(kind, child)

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replace the status and return the live object, or None if the resource is gone.

        Raises:
            KubeError: with status 409 if the resource changed since it was read.
        """
        metadata = resource["metadata"]
        # A merge patch replaces the list of conditions as a whole and keeps fields that it does not name. The resource
        # version makes it fail if the resource changed meanwhile.
        gone = {field: None for field in resource.get("status", {}) if field not in status}
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": {**gone, **status}}
        path = FASTGEN.path(metadata["namespace"], metadata["name"], "status")
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            live: Object = self._write("PATCH", path, query, body, "application/merge-patch+json")
        except KubeError as error:
            if error.status != 404:
                raise
            return None
        self._metrics.writes.labels(f"{FASTGEN.name}/status").inc()
        self._cache.put(FASTGEN, live)
        return live

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Set annotations on this object and return it, or None if it is gone."""
        metadata = obj["metadata"]
        body = {"metadata": {"uid": metadata["uid"], "annotations": annotations}}
        path = kind.path(metadata["namespace"], metadata["name"])
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            live: Object = self._write("PATCH", path, query, body, "application/merge-patch+json")
        except KubeError as error:
            # 409: the name belongs to another object now.
            if error.status not in (404, 409):
                raise
            return None
        self._metrics.writes.labels(kind.name).inc()
        self._cache.put(kind, live)
        return live

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        """Create a Kubernetes Event about the resource, and return its name."""
        metadata = resource["metadata"]
        name = f"{metadata['name']}.{uuid4().hex[:16]}"
        body = {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": FASTGEN.api_version,
                "kind": FASTGEN.name,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "count": 1,
            **event,
        }
        self._write("POST", EVENT.path(metadata["namespace"]), body=body, content_type="application/json")
        self._metrics.writes.labels(EVENT.name).inc()
        return name

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        """Update the count and the last timestamp of an Event."""
        path = EVENT.path(resource["metadata"]["namespace"], name)
        body: Object = {"count": count, "lastTimestamp": time}
        self._write("PATCH", path, body=body, content_type="application/merge-patch+json")
        self._metrics.writes.labels(EVENT.name).inc()

    def _write(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        # Checked as late as possible: a process that was paused for longer than its lease continues here.
        if not self._leads():
            raise KubeError(0, "not written: this operator does not lead any more")
        return self._send(method, path, query, body, content_type)

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        pause = self._not_before - time.monotonic()
        if pause > 0:
            # Retry-After applies to the requests of all workers.
            raise KubeError(429, "not sent: backing off, the API server sent Retry-After", pause)
        try:
            return self._server.request(method, path, query, body, content_type)
        except KubeError as error:
            self._not_before = max(self._not_before, time.monotonic() + error.retry_after)
            raise
