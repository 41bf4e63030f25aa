"""One request to the API server over the official client: plain objects in and out, errors with their status."""

from __future__ import annotations

import json
from typing import Any

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3.exceptions import HTTPError

from fastgen_operator.kinds import Object
from fastgen_operator.metrics import Metrics

_CONNECT_SECONDS = 5.0
# The longest that a server is left alone because it asked for it, seconds.
_LONGEST_PAUSE = 60.0
# Answers that the same request gets again until somebody changes the spec or the cluster's rules.
_REFUSALS = (400, 403, 404, 405, 413, 422)


class KubeError(Exception):
    """The API server's answer was an error.

    Attributes:
        status: HTTP's; 0 where there was no answer.
        retry_after: seconds that the server asks to be left alone for; 0 where it does not say.
        causes: why, in the server's words for programs.
    """

    def __init__(self, status: int, message: str, retry_after: float = 0.0, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.causes = causes

    @property
    def is_namespace_leaving(self) -> bool:
        """Whether nothing can be made any more because the namespace is being deleted, and all in it too."""
        return "NamespaceTerminating" in self.causes

    @property
    def is_refusal(self) -> bool:
        """Whether the server understood and refused, rather than failed or was busy.

        An admission webhook that nobody answers for is a refusal too: it stays until somebody mends or removes it.
        """
        return self.status in _REFUSALS or "failed calling webhook" in str(self)


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
    # None but the work queue tries again: it knows of every other resource, and of what the server asked for. A worker
    # that slept in here, as the client does when it is asked to come back later, would be lost to all of them.
    configuration.retries = 0
    return ApiClient(configuration)


class ApiServer:
    """Sends requests; safe to use from several threads. Each is counted by method and answer.

    `timeout`: seconds without a byte after which a request has failed: a dead connection must not hold a worker.
    """

    def __init__(self, client: ApiClient, metrics: Metrics, timeout: float) -> None:
        self._client = client
        self._metrics = metrics
        self._timeout = (min(_CONNECT_SECONDS, timeout), timeout)

    def request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        """The answer's JSON.

        Raises:
            KubeError: any answer but success, or none.
        """
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if content_type else {})
        request = self._client.param_serialize(
            method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = self._client.call_api(*request, _request_timeout=self._timeout)
            data: bytes = response.read()  # type: ignore[no-untyped-call]
        except (HTTPError, ApiException) as error:
            self._metrics.api_requests.labels(method, "none").inc()
            raise KubeError(0, f"reaching the API server: {error}") from error
        self._metrics.api_requests.labels(method, str(response.status)).inc()
        if not 200 <= response.status < 300:
            words, causes = _words(data)
            words = words or f"{method} {path}: HTTP {response.status}"
            raise KubeError(response.status, words, _seconds(response.headers.get("Retry-After")), causes)
        try:
            return json.loads(data)
        except ValueError as error:
            raise KubeError(0, f"reaching the API server: {method} {path} was answered by no JSON") from error


def _words(data: bytes) -> tuple[str, tuple[str, ...]]:
    """What an answer says to people, and its causes."""
    try:
        answer = json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip(), ()
    if not isinstance(answer, dict):
        return str(answer), ()
    causes = (answer.get("details") or {}).get("causes") or ()
    return str(answer.get("message", "")), tuple(str(cause.get("reason", "")) for cause in causes)


def _seconds(header: str | None) -> float:
    """A Retry-After header in seconds; 0 for none, and for a date, which API servers do not send."""
    return min(float(header), _LONGEST_PAUSE) if header is not None and header.isdecimal() else 0.0
