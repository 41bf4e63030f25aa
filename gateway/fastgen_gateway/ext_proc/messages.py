"""Messages of Envoy's external processing protocol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus

from fastgen_gateway.routing.refusal import Refusal

# Where the request goes, as header and as metadata: names of the endpoint picker protocol of the Gateway API inference
# extension (its proposal 004).
DESTINATION: Final = "x-gateway-destination-endpoint"
DESTINATION_METADATA: Final = "envoy.lb"
# What the access log tells of a choice.
LOGGED: Final = "fastgen"
# Where the next try goes: read by `envoy.yaml`.
FALLBACK: Final = "x-fallback-endpoint"
# A request with this header gets a response with the reasons of the choice.
EXPLAIN: Final = "x-fastgen-explain"
AUTHORIZATION: Final = "authorization"
_ADDRESS: Final = "upstream.address"

# In the metadata of the picker's own responses: `envoy.yaml` leaves them as they are.
_RESPONDS: Final = "responds"
# What Envoy sends of a request from its body on. Without it, `envoy.yaml` sends nothing of the response.
_MODE: Final = ProcessingMode(
    request_header_mode=ProcessingMode.SEND,
    request_body_mode=ProcessingMode.BUFFERED,
    response_header_mode=ProcessingMode.SEND,
    request_trailer_mode=ProcessingMode.SKIP,
    response_trailer_mode=ProcessingMode.SKIP,
)

CONTINUE_REQUEST: Final = ProcessingResponse(request_headers=HeadersResponse(), mode_override=_MODE)
CONTINUE_RESPONSE: Final = ProcessingResponse(response_headers=HeadersResponse())


def accepted(client: str) -> ProcessingResponse:
    """Return the answer to the headers of a request with a valid key; the access log names its client."""
    answer = ProcessingResponse(request_headers=HeadersResponse(), mode_override=_MODE)
    answer.dynamic_metadata.get_or_create_struct(LOGGED)["client"] = client
    return answer


def headers_of(headers: HttpHeaders) -> dict[str, str]:
    """Return the headers by name; Envoy's pseudo headers, such as `:path`, included."""
    return {
        each.key: each.raw_value.decode("latin-1") if each.raw_value else each.value for each in headers.headers.headers
    }


def served_address(message: ProcessingRequest) -> str | None:
    """Return the address of the replica that answers, from the attributes of a response; None if Envoy answers."""
    for attributes in message.attributes.values():
        if _ADDRESS in attributes.fields:
            return attributes.fields[_ADDRESS].string_value or None
    return None


def is_explained(headers: HttpHeaders) -> bool:
    """Return whether a client asks for the reasons of the choice."""
    return any(each.key == EXPLAIN for each in headers.headers.headers)


def answered(shown: Mapping[str, str | float], logged: Mapping[str, str | float]) -> ProcessingResponse:
    """Return the answer to the headers of a response that adds facts to them, and others to the access log."""
    headers = [(f"x-fastgen-{name.replace('_', '-')}", str(value)) for name, value in shown.items()]
    common = CommonResponse(header_mutation=HeaderMutation(set_headers=header_options(headers)))
    answer = ProcessingResponse(response_headers=HeadersResponse(response=common))
    answer.dynamic_metadata.get_or_create_struct(LOGGED).update(logged)
    return answer


def destination(
    address: str,
    fallback: str | None,
    facts: Mapping[str, str | float],
    body: bytes | None = None,
    authorization: str | None = "",
) -> ProcessingResponse:
    """Return the answer to a request's body that sends it to a replica.

    Args:
        address: of the replica.
        fallback: address for the next try.
        facts: what the access log tells of the choice.
        body: replaces the request's body.
        authorization: replaces this header; None removes it, and an empty text leaves it.
    """
    headers = {DESTINATION: address} | ({FALLBACK: fallback} if fallback else {})
    headers |= {AUTHORIZATION: authorization} if authorization else {}
    if body is not None:
        # Envoy rejects a new body with the length of the old one.
        headers["content-length"] = str(len(body))
    common = CommonResponse(
        clear_route_cache=True,  # the route depends on the header
        header_mutation=HeaderMutation(
            set_headers=header_options(headers.items()), remove_headers=[AUTHORIZATION] if authorization is None else []
        ),
        body_mutation=None if body is None else BodyMutation(body=body),
    )
    answer = ProcessingResponse(request_body=BodyResponse(response=common))
    answer.dynamic_metadata.get_or_create_struct(DESTINATION_METADATA)[DESTINATION] = address
    answer.dynamic_metadata.get_or_create_struct(LOGGED).update(facts)
    return answer


def more_time(seconds: float) -> ProcessingResponse:
    """Return the message that makes Envoy wait for the answer to its last message."""
    answer = ProcessingResponse()
    answer.override_message_timeout.FromMilliseconds(int(seconds * 1000))
    return answer


def refusal(refused: Refusal) -> ProcessingResponse:
    """Return the message that answers a request with an error."""
    more = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    return immediate(refused.status, refused.body(), more, details=refused.code)


def immediate(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, details: str = "gateway"
) -> ProcessingResponse:
    """Return the message that answers a request with JSON."""
    content = {"content-type": "application/json", **(headers or {})}
    answer = ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=status),
            headers=HeaderMutation(set_headers=header_options(content.items())),
            body=json.dumps(body).encode(),
            details=details,
        )
    )
    answer.dynamic_metadata.get_or_create_struct(LOGGED)[_RESPONDS] = True
    return answer


def header_options(headers: Iterable[tuple[str, str]]) -> list[HeaderValueOption]:
    """Return headers as options that add or replace them."""
    action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=action)
        for name, value in headers
    ]
