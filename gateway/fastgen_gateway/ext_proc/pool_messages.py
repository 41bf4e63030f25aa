"""Messages of the endpoint picker protocol of the Gateway API inference extension (its proposal 004).

A Gateway sends the headers and bodies of requests and responses in pieces, and gets them back in pieces
(FULL_DUPLEX_STREAMED).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

from fastgen_gateway.ext_proc.messages import DESTINATION, DESTINATION_METADATA, header_options, served_address
from fastgen_operator.kinds import Key
from fastgen_operator.labels_and_annotations import PICKER_SUFFIX

_SUBSET_METADATA: Final = "envoy.lb.subset_hint"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_SERVED: Final = "x-gateway-destination-endpoint-served"
# Some Gateways accept no piece above 64 KiB.
_PIECE_BYTES: Final = 62_000
# NAME-picker.NAMESPACE, perhaps with a domain and a port.
_AUTHORITY: Final = re.compile(rf"([a-z0-9-]+){PICKER_SUFFIX}\.([a-z0-9-]+)(?:\.[a-z0-9.-]*)?(?::[0-9]+)?")

CONTINUE_TRAILERS: Final = ProcessingResponse(response_trailers=TrailersResponse())


def pool_of(authority: str) -> Key | None:
    """Return the key of the FastGenDeployment whose picker has this name, or None if no picker can have it."""
    found = _AUTHORITY.fullmatch(authority.lower())
    return None if found is None else (found[2], found[1])


def streams_requests(first: ProcessingRequest) -> bool:
    """Return whether the bodies of requests come in pieces, by the first message. Some Gateways do not tell."""
    mode = first.protocol_config.request_body_mode
    return not first.HasField("protocol_config") or mode == ProcessingMode.FULL_DUPLEX_STREAMED


def copies_responses(first: ProcessingRequest) -> bool:
    """Return whether pieces of responses have to be sent back, by the first message; else they are only shown."""
    return bool(first.protocol_config.response_body_mode != ProcessingMode.STREAMED)


def subset(message: ProcessingRequest) -> Collection[str] | None:
    """Return the addresses of the replicas that may get the request; None if all may."""
    hint = message.metadata_context.filter_metadata.get(_SUBSET_METADATA)
    if hint is None or _SUBSET not in hint.fields:
        return None
    value = hint.fields[_SUBSET]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return {part.strip() for text in texts for part in text.split(",") if part.strip()}


def served_by(message: ProcessingRequest) -> str | None:
    """Return the address of the replica that answers, from the headers of a response; None if it is not told."""
    told = message.metadata_context.filter_metadata.get(DESTINATION_METADATA)
    if told is not None and _SERVED in told.fields:
        return told.fields[_SERVED].string_value or None
    return served_address(message)


def routed(address: str, body: bytes | None, *, trailers: bool = False) -> Iterator[ProcessingResponse]:
    """Yield the answers that send a request to a replica: to its headers, and to its whole body.

    Args:
        address: of the replica.
        body: None for a request without one.
        trailers: whether they follow the body.
    """
    common = CommonResponse(
        clear_route_cache=True, header_mutation=HeaderMutation(set_headers=header_options([(DESTINATION, address)]))
    )
    answer = ProcessingResponse(request_headers=HeadersResponse(response=common))
    answer.dynamic_metadata.get_or_create_struct(DESTINATION_METADATA)[DESTINATION] = address
    yield answer
    if body is not None:
        for start in range(0, len(body) or 1, _PIECE_BYTES):
            is_last = start + _PIECE_BYTES >= len(body) and not trailers
            yield ProcessingResponse(request_body=_piece(body[start : start + _PIECE_BYTES], is_last=is_last))
    if trailers:
        yield ProcessingResponse(request_trailers=TrailersResponse())


def response_piece(body: HttpBody, *, copied: bool) -> ProcessingResponse:
    """Return the answer to a piece of a response, which goes on as it is.

    Args:
        body: the piece.
        copied: whether the Gateway sends on what is in the answer; else it has kept the piece.
    """
    if not copied:
        return ProcessingResponse(response_body=BodyResponse())
    return ProcessingResponse(response_body=_piece(body.body, is_last=body.end_of_stream))


def _piece(data: bytes, *, is_last: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=data, end_of_stream=is_last)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))
