"""Requests to the API server over the official client: decoded JSON in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from kubernetes.client import ApiClient, ApiException, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3 import BaseHTTPResponse as HTTPResponse
from urllib3.exceptions import HTTPError, MaxRetryError, ReadTimeoutError

from fastgen_operator.decode import decode, decode_page
from fastgen_operator.kinds import Object
from fastgen_operator.kube.clock import ClusterClock
from fastgen_operator.metrics import Metrics
from fastgen_operator.page_limit import PAGE_BYTES, PageLimit

# Query parameters of a request, in order.
Query = list[tuple[str, str]]

_CHUNK: Final = 1 << 16

_CONNECT_SECONDS = 5.0
# Upper bound of Retry-After, seconds.
_LONGEST_PAUSE = 60.0
# Responses that repeat until the spec or the cluster's configuration changes.
_REFUSALS = (400, 403, 404, 405, 413, 422)
# The API server answers these with 500, although they repeat until something changes: a server-side apply with an
# unknown field or a value of the wrong type, and an admission webhook that it cannot reach.
_REFUSED_WITH_500 = ("failed to create typed patch object", "unable to convert unstructured", "failed calling webhook")


class KubeError(Exception):
    """A request to the API server failed.

    Attributes:
        status: HTTP status of the response, or of the earlier one whose Retry-After still lasts; 0 without a usable
            response, or for a write without leadership.
        retry_after: seconds that Retry-After still lasts, at most `_LONGEST_PAUSE`; 0 without that header.
        causes: reasons in the response's `details.causes`.
        is_status: False if the response was not a Status. A Status concerns this request alone: a 429 or 503 may come
            from an admission webhook of one namespace, or from a kind that cannot be read yet. An overloaded API
            server, or a proxy before it, answers in plain text.
    """

    def __init__(
        self,
        status: int,
        message: str,
        retry_after: float = 0.0,
        causes: tuple[str, ...] = (),
        *,
        is_status: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.causes = causes
        self.is_status = is_status

    @property
    def is_namespace_leaving(self) -> bool:
        """Whether the write failed because the namespace is being deleted."""
        return "NamespaceTerminating" in self.causes

    @property
    def is_overload(self) -> bool:
        """Whether the server asks for fewer requests of any kind."""
        return self.retry_after > 0 and not self.is_status

    @property
    def is_answer(self) -> bool:
        """Whether the server handled this request.

        If not, it is unreachable or overloaded, or rejects the credentials: the next request probably fails, too.
        """
        return self.status not in (0, 401, 504) and (self.is_status or self.status not in (429, 503))

    @property
    def is_refusal(self) -> bool:
        """Whether the server rejected the object, rather than failed, was busy, or is deleting the namespace.

        An unreachable admission webhook counts as a rejection: it lasts until the webhook is repaired or removed.
        """
        refuses = self.status in _REFUSALS or any(words in str(self) for words in _REFUSED_WITH_500)
        return refuses and not self.is_namespace_leaving


def connect(connections: int = 1) -> ApiClient:
    """Return a client with the pod's service account, or else with the kubeconfig.

    Args:
        connections: number of threads that send requests at once. Each keeps a connection.

    Raises:
        ConfigException: there is neither, or the kubeconfig is invalid.
    """
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    # Only the work queue retries: it serves other resources meanwhile, and honours Retry-After. A retry in the client
    # would block a worker.
    configuration.retries = 0
    # The default depends on the number of processors. urllib3 closes connections beyond this number after each request.
    configuration.connection_pool_maxsize = connections
    return ApiClient(configuration)


class ApiServer:
    """Sends requests, and counts them by method and status; safe to use from several threads.

    Args:
        timeout: seconds without data after which a request fails, so that a dead connection does not block a worker.
        ended: called after each request in its thread, whether or not it succeeded.
        clock: compared with the Date header of each response.
    """

    def __init__(
        self,
        client: ApiClient,
        metrics: Metrics,
        timeout: float,
        ended: Callable[[], None] = lambda: None,
        clock: ClusterClock | None = None,
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._ended = ended
        self._clock = clock or ClusterClock()
        self._timeout = (min(_CONNECT_SECONDS, timeout), timeout)
        self._page_limits: dict[str, PageLimit] = {}  # of the last list, by the kind's plural

    def request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Any:
        """Send a request and return the decoded response.

        Raises:
            KubeError: no response, a status other than 2xx, or a body that is not JSON.
        """
        return _decoded(method, path, decode, self._send(method, path, query, body, content_type))

    def list(self, path: str, query: Query) -> tuple[str, Iterator[Any]]:
        """Return the resource version of a list, and an iterator over its objects.

        Pages have at most `PAGE_BYTES`. A page of more bytes is requested again with fewer objects. If the server does
        not return a page in time, the list fails, and the next one of the kind begins with fewer objects.

        Raises:
            KubeError: as `request`, or one object has more than `PAGE_BYTES`. The iterator reads further pages, and
                raises it too.
        """
        limit = self._page_limits.setdefault(path.rpartition("/")[2], PageLimit())
        first = self._page(path, query, limit)
        return str(first[0]["resourceVersion"]), self._objects(path, query, first, limit)

    def _objects(self, path: str, query: Query, page: tuple[Any, Iterator[Any]], limit: PageLimit) -> Iterator[Any]:
        while True:
            metadata, items = page
            yield from items
            if not (more := metadata.get("continue")):
                return
            page = self._page(path, [*query, ("continue", more)], limit)

    def _page(self, path: str, query: Query, limit: PageLimit) -> tuple[Any, Iterator[Any]]:
        while True:
            began = self._clock.elapsed()
            try:
                data = self._send("GET", path, [("limit", str(limit.objects)), *query], most_bytes=PAGE_BYTES)
            except KubeError as error:
                if _is_too_slow(error):
                    limit.too_slow()
                raise
            if data is not None:
                limit.follow(len(data), self._clock.elapsed() - began)
                page: tuple[Any, Iterator[Any]] = _decoded("GET", path, decode_page, data)
                return page
            try:
                limit.too_large()
            except ValueError as error:
                raise KubeError(0, str(error)) from None

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Object | None = None,
        content_type: str | None = None,
        most_bytes: int | None = None,
    ) -> Any:
        """Send a request and return the body of the response; None if it has more than `most_bytes`."""
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if content_type else {})
        verb, url, signed, _, _ = self._client.param_serialize(
            method, path, query_params=query or [], header_params=headers, auth_settings=["BearerToken"]
        )
        began = self._clock.elapsed()
        try:
            # The body is plain JSON: the client would walk through it to convert its own models.
            response = self._client.call_api(verb, url, signed, body, _request_timeout=self._timeout)
            self._clock.heard(response.headers.get("Date"), began)
            data = _body(response.response, most_bytes)
        except (HTTPError, ApiException) as error:
            self._metrics.api_requests.labels(method, "none").inc()
            # Without the URL, which is another for each page: an error that lasts is reported once.
            cause = error.reason if isinstance(error, MaxRetryError) and error.reason else error
            raise KubeError(0, f"reaching the API server: {cause}") from error
        finally:
            self._ended()
        self._metrics.api_requests.labels(method, str(response.status)).inc()
        if not 200 <= response.status < 300:
            raise _error_of(f"{method} {path}", response.status, response.headers.get("Retry-After"), data or b"")
        return data


def _is_too_slow(error: KubeError) -> bool:
    """Return whether the server is reachable, but had no time to answer."""
    cause = error.__cause__
    reason = cause.reason if isinstance(cause, MaxRetryError) else cause
    return error.status == 504 or isinstance(reason, ReadTimeoutError)


def _body(response: HTTPResponse, most_bytes: int | None) -> bytes | None:
    """Read the body of a response; stop, and return None, after `most_bytes`."""
    parts, size = [], 0
    for part in response.stream(_CHUNK):
        size += len(part)
        if most_bytes is not None and size > most_bytes:
            # The rest is not read: the connection cannot be used again.
            response.close()
            return None
        parts.append(part)
    response.release_conn()
    return b"".join(parts)


def _decoded(method: str, path: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise KubeError(0, f"{method} {path} returned a body that is not JSON") from error


def _error_of(request: str, status: int, retry_after: str | None, data: bytes) -> KubeError:
    """Return the error that a response describes."""
    seconds, silence = seconds_of(retry_after), f"{request}: HTTP {status}"
    try:
        answer = decode(data)
    except ValueError:
        answer = data.decode(errors="replace").strip()
    if not isinstance(answer, dict):
        return KubeError(status, str(answer) or silence, seconds, is_status=False)
    causes = (answer.get("details") or {}).get("causes") or ()
    reasons = tuple(str(cause.get("reason", "")) for cause in causes)
    return KubeError(status, str(answer.get("message", "")) or silence, seconds, reasons)


def seconds_of(header: str | None) -> float:
    """Parse Retry-After, up to `_LONGEST_PAUSE`.

    Return 0 without the header, and for a date, which API servers do not send.
    """
    return min(float(header), _LONGEST_PAUSE) if header is not None and header.isdecimal() else 0.0
