"""The operator's own reads and writes of the API server: plain objects in and out, over the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3.exceptions import HTTPError

from fastgen_operator.kinds import EVENT, FASTGEN, FIELD_MANAGER, Kind, Object
from fastgen_operator.metrics import Metrics

# Connecting and reading, seconds: a dead connection must not hold a worker for ever.
_TIMEOUT = (5.0, 30.0)
# Objects in one answer to a list: all pods of a large cluster at once would be a hundred megabytes.
_PAGE = 500
# Answers that the same request gets again until somebody changes the spec or the cluster's rules.
_REFUSALS = (400, 403, 404, 405, 413, 422)


# Parameters of a request, in order.
Query = list[tuple[str, str]]


class KubeError(Exception):
    """The API server's answer was an error: `status` is HTTP's, the message its words; 0 where there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server understood and refused, rather than failed or was busy."""
        return self.status in _REFUSALS


def connect() -> ApiClient:
    """A client with the pod's service account, or else with the kubeconfig.

    Raises:
        ConfigException: where there is neither; its message says which file was looked for.
    """
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return ApiClient(configuration)


class Kube:
    """Reads and writes; safe to use from several threads. Every write that changed something is counted."""

    def __init__(self, client: ApiClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            found: Object = self._request("GET", kind.path(namespace, name))
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
        first = self._request("GET", kind.path(namespace), query)
        return str(first["metadata"]["resourceVersion"]), self._items(kind, kind.path(namespace), query, first)

    def _items(self, kind: Kind, path: str, query: Query, page: Any) -> Iterator[Object]:
        while True:
            for item in page["items"]:
                # The items of a list come without the two fields that every object read by itself has.
                yield {"apiVersion": kind.api_version, "kind": kind.name, **item}
            if not (more := page["metadata"].get("continue")):
                return
            page = self._request("GET", path, [*query, ("continue", more)])

    def plurals(self, group: str, version: str) -> frozenset[str]:
        """The resources of that group and version; none where the cluster does not have it."""
        try:
            answer = self._request("GET", f"/apis/{group}/{version}")
        except KubeError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(resource["name"] for resource in answer["resources"])

    def apply(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply under the operator's field manager; returns the live object."""
        metadata = manifest["metadata"]
        live: Object = self._request(
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
            self._request("DELETE", path, body=body, content_type="application/json")
        except KubeError as error:
            # 409: another object has taken the name, which is none of ours.
            if error.status not in (404, 409):
                raise
            return
        self._metrics.writes.labels(kind.name).inc()

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object:
        """Replaces the status, if the resource is still the one that was read (else KubeError 409)."""
        metadata = resource["metadata"]
        # A merge patch replaces the list of conditions whole, and keeps fields that it does not name; the version says
        # that nobody wrote in between.
        gone = {field: None for field in resource.get("status", {}) if field not in status}
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": {**gone, **status}}
        live: Object = self._request(
            "PATCH",
            FASTGEN.path(metadata["namespace"], metadata["name"], "status"),
            [("fieldManager", FIELD_MANAGER)],
            body,
            "application/merge-patch+json",
        )
        self._metrics.writes.labels(f"{FASTGEN.name}/status").inc()
        return live

    def create_event(self, resource: Object, event: dict[str, Any]) -> None:
        """Records a Kubernetes Event about the resource."""
        metadata = resource["metadata"]
        body = {
            "metadata": {"name": f"{metadata['name']}.{uuid4().hex[:16]}", "namespace": metadata["namespace"]},
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
        self._request("POST", EVENT.path(metadata["namespace"]), body=body, content_type="application/json")
        self._metrics.writes.labels(EVENT.name).inc()

    def _request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if content_type else {})
        request = self._client.param_serialize(
            method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = self._client.call_api(*request, _request_timeout=_TIMEOUT)
            data: bytes = response.read()  # type: ignore[no-untyped-call]
        except (HTTPError, ApiException) as error:
            raise KubeError(0, f"reaching the API server: {error}") from error
        if not 200 <= response.status < 300:
            raise KubeError(response.status, _words(data) or f"{method} {path}: HTTP {response.status}")
        return json.loads(data)


def _words(data: bytes) -> str:
    try:
        answer = json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip()
    return str(answer.get("message", "")) if isinstance(answer, dict) else str(answer)
