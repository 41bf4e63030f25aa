"""Errors in OpenAI's format: `{"error": {message, type, param, code}}` and a matching HTTP status."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from fastgen.core.request_error import RequestError
from fastgen.text.grammars.checker import CheckerUnavailable

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class APIError(Exception):
    """An error response.

    Attributes:
        status: HTTP status.
        message: what happened and what to do.
        param: the invalid field, if any.
        code: machine-readable error code; for rejections also the label `reason` of
            `fastgen_request_rejected_total`.
        retry_after: value of the Retry-After header, in seconds; None for no header.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the JSON body, for a response or a stream event."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body()), status_code=self.status, media_type="application/json", headers=headers
        )


class FailedRequest(APIError):
    """The error of a request that was admitted, or that a defect of the server ended: it was not rejected."""


def engine_died(reason: str) -> FailedRequest:
    """Return the error for a request that was running when the engine died of `reason`."""
    return FailedRequest(500, f"the engine died during this request: {reason}; try again", code="engine_dead")


def out_of_memory() -> FailedRequest:
    """Return the error for a request that the device lacked the memory to compute, even alone."""
    return FailedRequest(
        503,
        "the device ran out of memory for this request, even with nothing else in the step: send a shorter one, try "
        "again later, or lower --memory-percent (spec.engine.kvCache.memoryPercent) to leave more for steps",
        code="out_of_memory",
    )


def rejected_by_engine() -> FailedRequest:
    """Return the error for a request that the engine rejected although the server had accepted it."""
    return FailedRequest(
        500, "internal error: the engine rejected this request; the server's log has the reason", code="internal_error"
    )


def grammar_too_complex() -> FailedRequest:
    """Return the error for a generation whose grammar takes too much work or memory to follow any further."""
    return FailedRequest(
        400,
        "the grammar or schema of this request takes too much work or memory to follow any further; simplify it, or "
        "lower max_tokens",
        code="grammar_too_complex",
    )


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
            return APIError(error.status_code, str(error.detail), code=code)
    return FailedRequest(
        500, f"internal error ({type(error).__name__}); the server's log has the details", code="internal_error"
    )


def invalid_json(message: str) -> APIError:
    """Return the error for a body that is not a JSON object."""
    return APIError(400, message, code="invalid_json")


def invalid_fields(error: ValidationError) -> APIError:
    """Return the error for a body with invalid fields; it names the first one."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if not param:
        return invalid_json(f"the body must be a JSON object with Content-Type: application/json ({message})")
    return APIError(400, f"{param}: {message}", code="invalid_value", param=param)
