"""Errors in OpenAI's format: `{"error": {message, type, param, code}}` and a matching HTTP status."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response
from starlette.exceptions import HTTPException

from fastgen.core.request_error import RequestError
from fastgen.text.grammars.checker import CheckerUnavailable

# The code of errors after which another replica can answer at once, and the header by which a proxy recognises them.
DRAINING = "draining"
_DRAINING_HEADER = {"X-FastGen-Draining": "1"}
# Longest text of a client that an error repeats.
_MOST_CHARACTERS = 2000
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class APIError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: what happened and what to do; its middle is cut if it is long, as it may quote the client.
        param: the invalid field, if any.
        code: machine-readable error code; for rejections also the label `reason` of
            `fastgen_request_rejected_total`.
        retry_after: value of the Retry-After header, in seconds; None for no header.
        allow: value of the Allow header: the methods of the route; None for no header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    def body(self) -> dict[str, Any]:
        """Return the JSON body, for a response or a stream event."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.code == DRAINING:
            headers |= _DRAINING_HEADER
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body()), status_code=self.status, media_type="application/json", headers=headers
        )


class FailedRequest(APIError):
    """The error of a request that was admitted, or that a defect of the server ended: it was not rejected."""


def from_exception(error: Exception) -> APIError:
    """Return the error for an exception that an endpoint or the framework raised."""
    match error:
        case APIError():
            return error
        case RequestError():
            return APIError(400, str(error), code="invalid_value", param=error.param)
        case CheckerUnavailable():
            return APIError(503, f"{error}; try again", code="grammars_unavailable", retry_after=1)
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "http_error")
            allow = (error.headers or {}).get("Allow")
            return APIError(error.status_code, str(error.detail), code=code, allow=allow)
    return FailedRequest(
        500, f"internal error ({type(error).__name__}); the server's log has the details", code="internal_error"
    )


def _shortened(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
