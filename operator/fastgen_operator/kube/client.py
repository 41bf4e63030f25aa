"""Reads and writes of objects on the API server.

Nothing is written while another operator may lead. A process can also be paused between that check and its request, so
each write names the version that it was planned from: the API server rejects a write that arrives after another one,
with 409. Events are the exception: they report what has happened, and no decision reads them.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from fastgen_operator.kinds import EVENT, FASTGEN, JOB, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.transport import ApiServer, KubeError, Query
from fastgen_operator.labels_and_annotations import APPLIED_ANNOTATION, DOWNLOADED_ANNOTATION
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.managed_fields import FIELD_MANAGER
from fastgen_operator.objects.stored import has_same_spec

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Method and path; a list has the method LIST.
_Request = tuple[str, str]

_MERGE_PATCH = "application/merge-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"

# An apply that names a version creates a missing object, and fails if the object exists with another version. No object
# has version 1: etcd's first write has a greater one.
_NO_VERSION = {"resourceVersion": "1"}

# Attempts of an apply while only the status or the metadata of its object changes.
_ATTEMPTS = 5


class KubeClient:
    """Reads live objects and writes them; safe to use from several threads. Writes are counted by kind.

    Every method raises KubeError if its request fails; the methods name the statuses with a special meaning.

    Args:
        cache: updated with the result of each write, so that the next read of the cache includes it.
        leads: returns whether this operator may write now; a write without leadership raises KubeError.
    """

    def __init__(self, server: ApiServer, cache: InformerCache, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._server = server
        self._cache = cache
        self._metrics = metrics
        self._leads = leads
        self._pauses: dict[_Request | None, tuple[float, KubeError]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return the live object from the API server, or None."""
        found: Object | None = self._find(kind.path(namespace, name))
        return found

    def list(
        self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = ""
    ) -> tuple[str, Iterator[Object]]:
        """Return the list's resource version and an iterator over the objects that match both selectors.

        Args:
            namespace: None for all namespaces.
            selector, fields: selectors of labels and of fields.

        Raises:
            KubeError: the API server failed. The iterator reads further pages, and raises it too.
        """
        selectors = (("labelSelector", selector), ("fieldSelector", fields))
        path = kind.path(namespace)
        request = ("LIST", path)
        version, items = self._guarded(request, self._server.list, path, [each for each in selectors if each[1]])
        return version, self._items(kind, request, items)

    def _items(self, kind: Kind, request: _Request, items: Iterator[Any]) -> Iterator[Object]:
        while (item := self._guarded(request, next, items, None)) is not None:
            # List items lack these two fields.
            yield {"apiVersion": kind.api_version, "kind": kind.name, **item}

    def plurals(self, group: str, version: str) -> frozenset[str]:
        """Return the plural resource names of an API group and version; empty if it is not served."""
        answer = self._find(f"/apis/{group}/{version}")
        return frozenset() if answer is None else frozenset(resource["name"] for resource in answer["resources"])

    def apply(self, kind: Kind, manifest: Object, before: Object | None) -> Object:
        """Apply the manifest as the operator's field manager, and return the live object.

        Args:
            before: the object that the manifest was compared with; None if it is to be created.

        Raises:
            KubeError: the write failed; with status 409 if the object exists already, or was deleted or has changed
                since `before` was read. Changes of its status or metadata count only if the kind has no generation, or
                after `_ATTEMPTS` of them.
        """
        for left in reversed(range(_ATTEMPTS)):
            version = _NO_VERSION if before is None else _version(before)
            body = {**manifest, "metadata": {**manifest["metadata"], **version}}
            try:
                return self._patch(kind, manifest, body, _APPLY_PATCH, [("force", "true")])
            except KubeError as error:
                live = self._reread(kind, manifest, error)
                # Controllers update the status and metadata at any time. The manifest does not depend on them.
                if not left or before is None or live is None or not has_same_spec(before, live):
                    raise
                before = live
        raise AssertionError("the last attempt returns or raises")

    def try_apply(self, kind: Kind, manifest: Object) -> Object:
        """Return the object that an apply of the manifest would store, without storing it.

        Raises:
            KubeError: the apply would fail.
        """
        query = [("fieldManager", FIELD_MANAGER), ("force", "true"), ("dryRun", "All")]
        answer: Object = self._send("PATCH", _path(kind, manifest), query, manifest, _APPLY_PATCH)
        return answer

    def replace_managers(
        self, kind: Kind, live: Object, managed_fields: builtins.list[dict[str, Any]]
    ) -> Object | None:
        """Replace the object's `managedFields`, and remove its fingerprint, so that the next apply is not skipped.

        Returns:
            The live object; None if it is gone.

        Raises:
            KubeError: with status 409 if the object changed since it was read.
        """
        annotations = {APPLIED_ANNOTATION: None}
        return self._merge_patch(
            kind, live, {"metadata": {"annotations": annotations, "managedFields": managed_fields}}
        )

    def delete(self, kind: Kind, obj: Object) -> bool:
        """Delete this object if it has not changed since it was read, and its dependents in the background.

        Return whether its deletion began; False if it is gone or has changed. The watch event of a change queues its
        resource again.
        """
        body = {"preconditions": _version(obj), "propagationPolicy": "Background"}
        try:
            answer = self._write(kind.name, "DELETE", _path(kind, obj), body)
        except KubeError as error:
            # 409: the name belongs to another object now, or the object changed.
            if error.status not in (404, 409):
                raise
            return False
        if answer["kind"] == kind.name:
            # It waits for a finalizer, or for its containers to end.
            self._cache.put(kind, answer)
        else:
            self._cache.remove(kind, obj)
        return True

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object | None:
        """Replace the status and return the live object, or None if the resource is gone.

        Raises:
            KubeError: with status 409 if the resource changed since it was read.
        """
        body = {"status": _replacing(resource.get("status", {}), status)}
        return self._merge_patch(FASTGEN, resource, body, subresource="status")

    def set_owners(self, kind: Kind, obj: Object, references: Sequence[Object]) -> Object | None:
        """Replace the owner references of this object and return it, or None if it is gone.

        Raises:
            KubeError: with status 409 if the object changed since it was read.
        """
        return self._merge_patch(kind, obj, {"metadata": {"ownerReferences": list(references)}})

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        """Set annotations on this object and return it, or None if it is gone.

        Raises:
            KubeError: with status 409 if the object changed since it was read.
        """
        return self._merge_patch(kind, obj, {"metadata": {"annotations": annotations}})

    def end_job(self, job: Object) -> Object | None:
        """End a Job whose download is complete, and return it, or None if it is gone. Its pods are deleted.

        Raises:
            KubeError: with status 409 if the Job changed since it was read.
        """
        # A Job can only be ended by a deadline; the annotation tells it from a failed one.
        annotations = {DOWNLOADED_ANNOTATION: "true"}
        return self._merge_patch(
            JOB, job, {"metadata": {"annotations": annotations}, "spec": {"activeDeadlineSeconds": 1}}
        )

    def create_event(self, about: Object, event: dict[str, Any]) -> str:
        """Create a Kubernetes Event about an object, and return its name."""
        metadata = about["metadata"]
        name = f"{metadata['name']}.{uuid4().hex[:16]}"
        body = {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "count": 1,
            **event,
        }
        self._write(EVENT.name, "POST", EVENT.path(metadata["namespace"]), body)
        return name

    def count_event(self, about: Object, name: str, count: int, time: str) -> None:
        """Update the count and the last timestamp of an Event."""
        path = EVENT.path(about["metadata"]["namespace"], name)
        self._write(EVENT.name, "PATCH", path, {"count": count, "lastTimestamp": time}, _MERGE_PATCH)

    def _find(self, path: str) -> Any:
        """Return the response of a GET; None if it is 404."""
        try:
            return self._send("GET", path)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def _merge_patch(self, kind: Kind, obj: Object, body: Object, subresource: str | None = None) -> Object | None:
        """Patch the version of the object that was read, and return the live object, or None if it is gone."""
        body = {**body, "metadata": {**body.get("metadata", {}), **_version(obj)}}
        try:
            return self._patch(kind, obj, body, _MERGE_PATCH, subresource=subresource)
        except KubeError as error:
            if error.status == 404:
                return None
            self._reread(kind, obj, error)
            raise

    def _reread(self, kind: Kind, obj: Object, error: KubeError) -> Object | None:
        """Return the live object after a conflict, and update the cache: a retry may be faster than the watch."""
        if error.status != 409 or (live := self._find(_path(kind, obj))) is None:
            return None
        self._cache.put(kind, live)
        newer: Object = live
        return newer

    def _patch(
        self,
        kind: Kind,
        obj: Object,
        body: Object,
        content_type: str,
        query: Query | None = None,
        subresource: str | None = None,
    ) -> Object:
        """Send a patch of an object, and return the live object."""
        counted = f"{kind.name}/{subresource}" if subresource else kind.name
        query = [("fieldManager", FIELD_MANAGER), *(query or [])]
        live: Object = self._write(counted, "PATCH", _path(kind, obj, subresource), body, content_type, query)
        changed = live["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion")
        (self._cache.put if changed else self._cache.correct)(kind, live)
        return live

    def _write(
        self,
        counted: str,
        method: str,
        path: str,
        body: Object,
        content_type: str = "application/json",
        query: Query | None = None,
    ) -> Any:
        """Send a write, and count it under the kind `counted` if it succeeds."""
        # Checked as late as possible: a process that was paused for longer than its lease continues here.
        if not self._leads():
            raise KubeError(0, "not written: this operator is no longer the leader")
        answer = self._send(method, path, query, body, content_type)
        self._metrics.writes.labels(counted).inc()
        return answer

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        return self._guarded((method, path), self._server.request, method, path, query, body, content_type)

    def _guarded(
        self,
        request: _Request,
        send: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Call a function that sends requests; raise KubeError while Retry-After of this request, or of all, lasts."""
        now = time.monotonic()
        for paused in (None, request):
            until, error = self._pauses.get(paused, (0.0, None))
            if error is not None and until > now:
                raise KubeError(error.status, str(error), until - now, error.causes, is_status=error.is_status)
        try:
            return send(*args, **kwargs)
        except KubeError as error:
            if error.retry_after:
                now = time.monotonic()
                kept = {key: pause for key, pause in self._pauses.items() if pause[0] > now}
                kept[None if error.is_overload else request] = now + error.retry_after, error
                self._pauses = kept
            raise


def _version(obj: Object) -> dict[str, str]:
    """Return the metadata that let a write fail if the object has changed, or was deleted and created again."""
    return {"uid": obj["metadata"]["uid"], "resourceVersion": obj["metadata"]["resourceVersion"]}


def _path(kind: Kind, obj: Object, subresource: str | None = None) -> str:
    return kind.path(obj["metadata"]["namespace"], obj["metadata"]["name"], subresource)


def _replacing(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes `new` out of `old`, with the fields to remove and with whole lists."""
    kept = {
        name: _replacing(old[name], value) if isinstance(value, dict) and isinstance(old.get(name), dict) else value
        for name, value in new.items()
    }
    return {**dict.fromkeys(old.keys() - new.keys()), **kept}
