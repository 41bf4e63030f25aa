"""A small HTTP client of a FastGen server: JSON requests; JSON, text or event-stream responses."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


class RemoteError(Exception):
    """The server cannot be reached or returned an error, or its URL is invalid. The message is one line.

    `status` is the HTTP status of an error response; None for other errors, those within a stream included.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


_NOT_OURS = "the response has another form; check that this is the URL of an OpenAI-compatible server"


class RemoteServer:
    """A server at `url`. Thread-safe: each call opens its own connection.

    Args:
        url: for example `http://127.0.0.1:8000`; a trailing `/v1` is ignored.
        api_key: sent as a bearer token, if given.
        timeout: seconds without any data before a request fails.

    Raises:
        RemoteError: `url` is not a server URL.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            http.client.HTTPConnection(parts.netloc)  # does not connect yet
        except (ValueError, http.client.InvalidURL):  # a malformed address or port, or white space
            is_valid = False
        if not is_valid:
            raise RemoteError(f"{url}: not a server URL: write it like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._timeout = timeout

    def get(self, path: str) -> str:
        """Return the response body as text.

        Raises:
            RemoteError: the server cannot be reached or returns an error.
        """
        with self._answer("GET", path, None) as answer:
            return answer.read().decode()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object of the response.

        Raises:
            RemoteError: the server cannot be reached, or returns an error or something that is not JSON.
        """
        with self._answer("POST", path, body) as answer:
            value: dict[str, Any] = json.loads(answer.read())
            return value

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response; closing the iterator closes the connection.

        Raises:
            RemoteError: the server cannot be reached, returns an error, or ends the stream early.
        """
        yield from self._events("POST", path, {**body, "stream": True})

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the events of an endless stream; closing the iterator closes the connection.

        Raises:
            RemoteError: the server cannot be reached, returns an error, or ends the stream.
        """
        yield from self._events("GET", path, None)

    def _events(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        with self._answer(method, path, body) as answer:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = event_of(data)
                except RemoteError as error:
                    raise RemoteError(f"{self.url}: {error}") from None
                yield event
        raise RemoteError(f"{self.url}: the connection closed before the end of the stream")

    def model_names(self) -> list[str]:
        """Return the names under which the server serves its model.

        Raises:
            RemoteError: the server cannot be reached, or returns an error, for example while it loads its model, or
                something that is not a list of models.
        """
        try:
            return [model["id"] for model in json.loads(self.get("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{self.url}/v1/models: {_NOT_OURS}") from error

    @contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=self._timeout)
        try:
            connection.request(
                method, self._parts.path + path, None if body is None else json.dumps(body), self._headers
            )
            answer = connection.getresponse()
            if answer.status >= 400:
                raise RemoteError(f"{self.url}{path}: {_reason(answer)}", answer.status)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RemoteError(f"{self.url}: {reason}") from error
        except ValueError as error:
            raise RemoteError(f"{self.url}{path}: {_NOT_OURS}") from error
        finally:
            connection.close()


def event_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a server-sent event.

    Raises:
        ValueError: the event is not a JSON object.
        RemoteError: it reports an error.
    """
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise ValueError(f"an event is not a JSON object: {data[:100].decode(errors='replace')}")
    if (error := event.get("error")) is None:
        return event
    raise RemoteError(str(error.get("message") if isinstance(error, dict) else error))


def _reason(answer: http.client.HTTPResponse) -> str:
    """Return the status and the server's error message, if any."""
    body = answer.read().decode(errors="replace")
    try:
        said = json.loads(body)
        message = said["error"]["message"] if "error" in said else said.get("status") or said.get("detail")
    except (ValueError, TypeError, KeyError, AttributeError):
        message = None
    return f"{answer.status} {message or answer.reason}"
