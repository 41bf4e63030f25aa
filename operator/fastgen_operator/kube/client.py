"""The operator's own reads and writes of objects. No write leaves it while another operator may lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

from fastgen_operator.kinds import EVENT, FASTGEN, FIELD_MANAGER, Kind, Object
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics

# Objects in one answer to a list: all pods of a large cluster at once would be a hundred megabytes.
_PAGE = 500

# Parameters of a request, in order.
Query = list[tuple[str, str]]


class Kube:
    """Reads and writes; safe to use from several threads. Every write that changed something is counted.

    `leads` says whether this operator may write at this moment; a write that may not leave raises KubeError.
    """

    def __init__(self, server: ApiServer, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._server = server
        self._metrics = metrics
        self._leads = leads
        self._not_before = 0.0

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            found: Object = self._send("GET", kind.path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return found

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[str, Iterator[Object]]:
        """All objects of that kind with those labels, as they were at the version that comes first.

        Of every namespace where `namespace` is None. The objects are read as they are asked for, which may raise
        KubeError too.
        """
        query = [("limit", str(_PAGE))] + ([("labelSelector", selector)] if selector else [])
        first = self._send("GET", kind.path(namespace), query)
        return str(first["metadata"]["resourceVersion"]), self._items(kind, kind.path(namespace), query, first)

    def _items(self, kind: Kind, path: str, query: Query, page: Any) -> Iterator[Object]:
        while True:
            for item in page["items"]:
                # The items of a list come without the two fields that every object read by itself has.
                yield {"apiVersion": kind.api_version, "kind": kind.name, **item}
            if not (more := page["metadata"].get("continue")):
                return
            page = self._send("GET", path, [*query, ("continue", more)])

    def plurals(self, group: str, version: str) -> frozenset[str]:
        """The resources of that group and version; none where the cluster does not have it."""
        try:
            answer = self._send("GET", f"/apis/{group}/{version}")
        except KubeError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(resource["name"] for resource in answer["resources"])

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply under the operator's field manager; returns the live object."""
        metadata = manifest["metadata"]
        live: Object = self._write(
            "PATCH",
            kind.path(metadata["namespace"], metadata["name"]),
            [("fieldManager", FIELD_MANAGER), ("force", "true")],
            manifest,
            "application/apply-patch+yaml",
        )
        self._metrics.writes.labels(kind.name).inc()
        return live

    def delete(self, kind: Kind, child: Object) -> None:
        """Deletes exactly this object, and in the background what it owns; harmless where it is gone."""
        metadata = child["metadata"]
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            self._write("DELETE", path, body=body, content_type="application/json")
        except KubeError as error:
            # 409: another object has taken the name, which is none of ours.
            if error.status not in (404, 409):
                raise
            return
        self._metrics.writes.labels(kind.name).inc()

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replaces the status, if the resource is still the one that was read (else KubeError 409).

        Returns the live object, or None where it is gone.
        """
        metadata = resource["metadata"]
        # A merge patch replaces the list of conditions whole, and keeps fields that it does not name; the version says
        # that nobody wrote in between.
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
        return live

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Sets annotations on exactly this object; returns it, or None where it is gone."""
        metadata = obj["metadata"]
        body = {"metadata": {"uid": metadata["uid"], "annotations": annotations}}
        path = kind.path(metadata["namespace"], metadata["name"])
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            live: Object = self._write("PATCH", path, query, body, "application/merge-patch+json")
        except KubeError as error:
            # 409: another object has taken the name.
            if error.status not in (404, 409):
                raise
            return None
        self._metrics.writes.labels(kind.name).inc()
        return live

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        """Records a Kubernetes Event about the resource; returns the Event's name."""
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
        """Says that what the Event of that name tells has happened so many times, the last at `time`."""
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
        # Asked as late as can be: a process that was stopped for longer than its lease goes on right here.
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
            # Whom it told is one visit; those that are under way beside it are meant as well.
            raise KubeError(429, "not sent: the API server has asked to be left alone", pause)
        try:
            return self._server.request(method, path, query, body, content_type)
        except KubeError as error:
            self._not_before = max(self._not_before, time.monotonic() + error.retry_after)
            raise
