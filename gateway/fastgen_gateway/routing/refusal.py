"""Requests that the gateway answers itself with an error, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# Names in a message.
_MOST_NAMES: Final = 20
_LONGEST_NAME: Final = 200
_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response.

    Attributes:
        status: HTTP status.
        code: machine-readable error code; also a label of `fastgen_gateway_requests_total`.
        message: what happened and what to do.
        param: the invalid field, if any.
        retry_after: value of the Retry-After header in seconds; None for no header.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_model(model: str, names: Iterable[str]) -> Refusal:
    """Return the error for an unknown model; `names` are the models that clients can use."""
    listed = sorted(names)
    shown = ", ".join(listed[:_MOST_NAMES]) + (f" and {len(listed) - _MOST_NAMES} more" if listed[_MOST_NAMES:] else "")
    remedy = f"use one of: {shown}" if listed else "expose a FastGenDeployment with spec.gateway.expose: true"
    # A model's name comes from the client: it may have megabytes.
    name = model if len(model) <= _LONGEST_NAME else f"{model[:_LONGEST_NAME]}…"
    message = f"the gateway has no model {name!r}; {remedy}"
    return Refusal(404, "model_not_found", message, param="model")


def invalid_key(authorization: str | None) -> Refusal:
    """Return the error for a request without a valid API key; `authorization` is the header's value, if it has one."""
    what = "the API key is not valid" if authorization else "no API key"
    return Refusal(401, "invalid_api_key", f"{what}: send Authorization: Bearer KEY")


def unknown_path(method: str, path: str) -> Refusal:
    """Return the error for a request without a body that does not ask for the list of models."""
    message = (
        f"the gateway has no {method} {path[:_LONGEST_NAME]}; send a POST request with a JSON body that has a model, "
        "or GET /v1/models"
    )
    return Refusal(404, "not_found", message)


def body_too_slow(seconds: float) -> Refusal:
    """Return the error for a request whose body takes too long to arrive."""
    return Refusal(
        408, "body_too_slow", f"the body has not arrived within {seconds:g} s; send it again, or a shorter one"
    )


def bodies_full(most_bytes: int) -> Refusal:
    """Return the error for a request with a large body that cannot be received now."""
    message = (
        f"the gateway receives at most {most_bytes >> 20} MiB of large bodies at a time, of all clients; try again"
    )
    return Refusal(503, "bodies_full", message, retry_after=1)


def body_too_large(most_bytes: int) -> Refusal:
    """Return the error for a request with a body that no engine accepts."""
    message = f"the body is larger than {most_bytes >> 20} MiB, the limit of the picker; send a shorter prompt"
    return Refusal(413, "too_large", message)


def unknown_pool(authority: str) -> Refusal:
    """Return the error for a call of a Gateway whose name for the picker is not that of a pool."""
    message = (
        f"the Gateway calls the picker as {authority[:_LONGEST_NAME]!r}, which names no InferencePool of an exposed "
        "FastGenDeployment; it must call it as NAME-picker.NAMESPACE, and the FastGenDeployment needs "
        "spec.gateway.expose: true"
    )
    return Refusal(503, "unknown_pool", message)


def body_not_streamed() -> Refusal:
    """Return the error for a Gateway that does not speak the endpoint picker protocol."""
    message = (
        "the Gateway must send bodies of requests to the picker as FULL_DUPLEX_STREAMED; correct its ext_proc filter"
    )
    return Refusal(500, "body_not_streamed", message)


def no_replica_of_pool() -> Refusal:
    """Return the error for a request to an InferencePool without a replica that may get it: nothing is held there."""
    message = "no replica is ready, and requests to an InferencePool are not held; try again later, or use the gateway"
    return Refusal(503, "no_ready_replica", message, retry_after=10)


def hold_full(limit: str) -> Refusal:
    """Return the error for a request that cannot wait: `limit` says which limit was reached."""
    message = f"no replica is ready, and the gateway holds {limit}; try again later"
    return Refusal(429, "held_requests_full", message, retry_after=10)


def hold_displaced() -> Refusal:
    """Return the error for a held request that was displaced by one for another model."""
    message = (
        "no replica is ready, and this request was displaced by one for a model with fewer held requests; "
        "try again later"
    )
    return Refusal(429, "held_requests_full", message, retry_after=10)


def held_too_long(seconds: float) -> Refusal:
    """Return the error for a request that waited in vain."""
    message = f"no replica had room for the request within {seconds:g} s; see the conditions of its FastGenDeployment"
    return Refusal(503, "no_ready_replica", message, retry_after=10)


def gateway_draining() -> Refusal:
    """Return the error for a request that would wait in a gateway pod that ends."""
    message = "no replica is ready, and this pod of the gateway is ending; try again: another one takes the request"
    return Refusal(503, "gateway_draining", message, retry_after=1)
