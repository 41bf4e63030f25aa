"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` with a true status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fastgen.core.request import RequestError

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}


class APIError(Exception):
    """An answer that is not the one asked for.

    Attributes:
        status: of HTTP.
        param: the field at fault, if one is.
        code: for programs to tell errors apart; also the reason in `request_rejected_total`.
        retry_after: seconds after which the client may try again, if that can help.
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
        """The JSON object that clients get, in a response of its own or in a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The response that says so."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            msgspec.json.encode(self.body()), status_code=self.status, media_type="application/json", headers=headers
        )


def engine_died(end: str) -> APIError:
    """For a request that was under way when the engine died; `end` says how it did."""
    return APIError(500, f"the engine stopped while it worked on this request: {end}", code="engine_dead")


def of_request(error: RequestError) -> APIError:
    """For a request that the engine's own rules refuse."""
    return APIError(400, str(error), code="invalid_value", param=error.param)


def of_validation(error: RequestValidationError) -> APIError:
    """For a body that is not what the endpoint takes: names the first field at fault."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    param = _dotted(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not param:
        return APIError(
            400, f"the body must be a JSON object with Content-Type: application/json ({message})", code="invalid_json"
        )
    return APIError(400, f"{param}: {message}", code="invalid_value", param=param)


def of_http(error: HTTPException) -> APIError:
    """For what the framework itself refuses: a path or a method that does not exist, a body that is too large."""
    code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "http_error")
    return APIError(error.status_code, str(error.detail), code=code)


def _dotted(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location[1:])
