"""What the streams of /v1/chat/completions and /v1/completions share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fastgen.engine.request_output import OutputDelta
from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import DONE, EventTemplate, event
from fastgen.server.serving.request_handler import RequestHandler


class ChunkEvents(ABC):
    """Encodes the chunks of a stream. Subclasses implement the rest of `StreamEvents`: `end`.

    Args:
        handler: the request.
        name: the model's name in chunks.
    """

    def __init__(self, handler: RequestHandler, name: str) -> None:
        self._handler = handler
        self._name = name
        # By choice, once only the text of its chunks changes until the last one.
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

    def fail(self, error: APIError) -> bytes:
        """Return the error, and the mark of the end."""
        return event(error.body()) + DONE

    @abstractmethod
    def _chunks(self, index: int, delta: OutputDelta) -> bytes:
        """Return the chunks of a delta that no template fits."""
