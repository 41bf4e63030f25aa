"""Receive Envoy's gRPC access log, which reports the tokens of clients' requests after they have ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceServicer

from fastgen_gateway.ext_proc.messages import LOGGED
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.client_limits import ClientLimits

# Bytes per token of responses without usage: of JSON, and of streams with one token per event.
_BYTES_PER_TOKEN: Final = 4
_BYTES_PER_EVENT: Final = 250
_EVENTS: Final = "text/event-stream"


class AccessLog(AccessLogServiceServicer):  # type: ignore[misc]  # generated without types
    """Counts the tokens of requests that were charged to a client.

    Args:
        limits: of the clients.
        metrics: of the gateway.
    """

    def __init__(self, limits: ClientLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics

    async def StreamAccessLogs(
        self, messages: AsyncIterator[StreamAccessLogsMessage], _: object
    ) -> StreamAccessLogsResponse:
        """Take entries until Envoy ends the stream."""
        async for message in messages:
            for entry in message.http_logs.log_entry:
                self._count(entry)
        return StreamAccessLogsResponse()

    def _count(self, entry: HTTPAccessLogEntry) -> None:
        facts = dict(entry.common_properties.metadata.filter_metadata[LOGGED])
        client, charged = str(facts["client"]), int(facts["charged_tokens"])
        prompt, completion = used_tokens(entry, facts)
        # Without a response, the picker has returned the charge.
        paid = charged if entry.response.response_code.value else 0
        self._limits.correct(client, prompt + completion - paid)
        self._metrics.used(client, prompt, completion)


def used_tokens(entry: HTTPAccessLogEntry, facts: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of a request's prompt and output: from the response's usage, or else from its size.

    Args:
        entry: of the request.
        facts: its metadata from the picker, with the estimate for the prompt, and from the filter that reads the usage.
    """
    if "usage_prompt_tokens" in facts:
        return int(facts["usage_prompt_tokens"]), int(facts["usage_completion_tokens"])
    response = entry.response
    if response.response_code.value >= HTTPStatus.BAD_REQUEST:
        return 0, 0
    streamed = response.response_headers.get("content-type", "").startswith(_EVENTS)
    num_bytes = response.response_body_bytes
    return int(facts["prompt_tokens"]), num_bytes // (_BYTES_PER_EVENT if streamed else _BYTES_PER_TOKEN)
