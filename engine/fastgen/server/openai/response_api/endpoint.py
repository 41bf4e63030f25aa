"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HTTPResponse

from fastgen.engine.request_output import OutputDelta
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import while_connected
from fastgen.server.openai.chat import admit_chat, chat_usage
from fastgen.server.openai.chat_choices import ChatChunkWriter, ChoiceOptions, chat_choice
from fastgen.server.openai.response_api.objects import (
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    begun_response,
    finished,
    items_of,
    new_id,
)
from fastgen.server.openai.response_api.request import ALIASES, ResponseRequest
from fastgen.server.openai.responses import ToolCallDelta, json_response
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream

router = APIRouter(route_class=JSONRoute)

# Events of the text of an item, by the item's type.
_TEXT_EVENTS = {
    ReasoningItem: "reasoning_text",
    MessageItem: "output_text",
    FunctionCallItem: "function_call_arguments",
}


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> HTTPResponse:
    """Generate a response. It is not stored."""
    service: Service = request.app.state.service
    name = service.check_model(body.model)
    with client_names(ALIASES):
        chat = body.chat()
        handler, options = await admit_chat(service, chat, "resp")
    begun = begun_response(body, handler, name, options)
    if body.stream:
        return TokenStream(handler, _StreamEvents(handler, options, begun))
    return await while_connected(request, _complete(handler, options, begun))


async def _complete(handler: RequestHandler, options: ChoiceOptions, begun: Response) -> HTTPResponse:
    with handler:
        (output,) = await handler.finish()
    choice = chat_choice(0, output, options)
    complete = finished(begun, chat_usage(handler, options), choice.finish_reason)
    return json_response(msgspec.structs.replace(complete, output=items_of(choice)))


class _StreamEvents:
    """Encodes the events of a stream. Each is numbered; items are opened and closed in order.

    The last event says that the stream has ended, so no end mark follows.
    """

    def __init__(self, handler: RequestHandler, options: ChoiceOptions, begun: Response) -> None:
        self._handler = handler
        self._options = options
        self._begun = begun
        self._writer = ChatChunkWriter(0, options)
        self._reason: str | None = None
        self._number = 0
        self._items: list[Item] = []  # finished
        self._open: Item | None = None
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        return b"".join(self._event(f"response.{kind}", response=self._begun) for kind in ("created", "in_progress"))

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        written: list[bytes] = []
        for chunk in self._writer.write(delta, self._handler.outputs[index]):
            self._reason = chunk.finish_reason
            if chunk.delta.reasoning:
                written += self._text(chunk.delta.reasoning, ReasoningItem)
            if chunk.delta.content:
                written += self._text(chunk.delta.content, MessageItem)
            for call in chunk.delta.tool_calls or ():
                written += self._call(call)
        return b"".join(written)

    def end(self) -> bytes:
        response = finished(self._begun, chat_usage(self._handler, self._options), self._reason)
        return self._end(response, "completed" if response.status == "completed" else "incomplete")

    def fail(self, error: APIError) -> bytes:
        return self._end(
            msgspec.structs.replace(self._begun, status="failed", error=ResponseError(error.message)), "incomplete"
        )

    def _end(self, response: Response, last_status: ItemStatus) -> bytes:
        closing = b"".join(self._close(last_status))
        kind = "incomplete" if response.status == "cancelled" else response.status
        return closing + self._event(f"response.{kind}", response=msgspec.structs.replace(response, output=self._items))

    def _text(self, text: str, kind: type[ReasoningItem] | type[MessageItem]) -> Iterator[bytes]:
        if not isinstance(self._open, kind):
            item = kind(new_id("rs" if kind is ReasoningItem else "msg"), [], "in_progress")
            yield from self._begin(item)
            yield self._part_event("response.content_part.added", part=_part(item, ""))
        yield from self._delta(text)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        if call.id is not None:
            name = call.function.name or ""
            yield from self._begin(FunctionCallItem(new_id("fc"), call.id, name, "", "in_progress"))
        if call.function.arguments:
            yield from self._delta(call.function.arguments)

    def _begin(self, item: Item) -> Iterator[bytes]:
        yield from self._close("completed")
        self._open, self._pieces = item, []
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, text: str) -> Iterator[bytes]:
        assert self._open is not None
        self._pieces.append(text)
        kind = _TEXT_EVENTS[type(self._open)]
        yield self._part_event(f"response.{kind}.delta", delta=text, **_logprobs(self._open))

    def _close(self, status: ItemStatus) -> Iterator[bytes]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        done = f"response.{_TEXT_EVENTS[type(item)]}.done"
        if isinstance(item, FunctionCallItem):
            yield self._part_event(done, arguments=text, name=item.name)
            closed: Item = msgspec.structs.replace(item, arguments=text, status=status)
        else:
            part = _part(item, text)
            yield self._part_event(done, text=text, **_logprobs(item))
            yield self._part_event("response.content_part.done", part=part)
            closed = msgspec.structs.replace(item, content=[part], status=status)
        yield self._event("response.output_item.done", output_index=len(self._items), item=closed)
        self._items.append(closed)
        self._open = None

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item. Items of text have one part; function calls have none."""
        assert self._open is not None
        index = {} if isinstance(self._open, FunctionCallItem) else {"content_index": 0}
        return self._event(kind, item_id=self._open.id, output_index=len(self._items), **index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _part(item: Item, text: str) -> OutputText | ReasoningText:
    return ReasoningText(text) if isinstance(item, ReasoningItem) else OutputText(text)


def _logprobs(item: Item) -> dict[str, list[None]]:
    return {"logprobs": []} if isinstance(item, MessageItem) else {}
