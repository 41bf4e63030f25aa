"""The streams of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from fastgen.receipt import Receipt
from fastgen.server.http.api_error import APIError
from fastgen.server.http.sse import DONE, EventTemplate, event
from fastgen.server.openai.generation_request import GenerationRequest
from fastgen.server.openai.receipts import ReceiptWriter
from fastgen.server.openai.response_bodies import ChatChunk, Completion, CompletionUsage
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.text.request_output import OutputDelta

B = TypeVar("B", bound=GenerationRequest)


class ChunkEvents(ABC, Generic[B]):
    """Encodes the chunks of a stream as `StreamEvents`.

    Args:
        handler: the request.
        name: the model's name in chunks.
        body: the request's body.
        receipts: writes the receipt; None if none is requested.
    """

    chunk_type: type[Completion] | type[ChatChunk]

    def __init__(self, handler: RequestHandler, name: str, body: B, receipts: ReceiptWriter | None) -> None:
        self._handler = handler
        self._head = handler.id, handler.created, name
        self._body = body
        self._receipts = receipts
        # By choice, if its chunks before the last differ only in their text.
        self._templates: dict[int, EventTemplate] = {}

    def begin(self) -> bytes:
        """Return nothing: the first chunks come with the first token."""
        return b""

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        """Return the chunks of a delta of generation `index`."""
        template = self._templates.get(index)
        if template is not None and delta.finish_reason is None:
            return template.event(delta.text)
        return self._chunks(index, delta)

    def end(self) -> bytes:
        """Return the chunk with the usage and the receipt, if one of them is requested, and `data: [DONE]`."""
        receipt: Receipt | UnsetType = UNSET
        if self._receipts is not None:
            receipt = self._receipts.write(self._handler.outputs, self._body.num_choices)
        elif not self._body.include_usage:
            return DONE
        usage = self._usage() if self._body.include_usage else UNSET
        fingerprint = self._handler.fingerprint
        last = self.chunk_type(*self._head, [], usage, receipt=receipt, system_fingerprint=fingerprint)
        return event(last) + DONE

    def fail(self, error: APIError) -> bytes:
        """Return the error and `data: [DONE]`."""
        return event(error.body()) + DONE

    @abstractmethod
    def _chunks(self, index: int, delta: OutputDelta) -> bytes:
        """Return the chunks of a delta that no template fits."""

    def _usage(self) -> CompletionUsage:
        """Return the usage at the end of the stream."""
        return CompletionUsage.of(self._handler.usage())

    def _usage_so_far(self) -> CompletionUsage | UnsetType | None:
        """Return the usage in a chunk before the end: null if it follows at the end, absent if not requested."""
        if self._body.continuous_usage:
            return CompletionUsage.of(self._handler.usage())
        return None if self._body.include_usage else UNSET
