"""Events of a streamed response, from the deltas of a chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fastgen.server.openai.response_api.objects import (
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    new_id,
)
from fastgen.server.openai.responses import Delta, ToolCallDelta

# Events of the text of an item, by the item's type.
_TEXT_EVENTS = {
    ReasoningItem: "reasoning_text",
    MessageItem: "output_text",
    FunctionCallItem: "function_call_arguments",
}


class ResponseEvents:
    """Writes the events of one response. Each is numbered; items are opened and closed in order.

    Attributes:
        items: the finished items.
    """

    def __init__(self, response: Response) -> None:
        self._response = response
        self._number = 0
        self._open: Item | None = None
        self._pieces: list[str] = []
        self.items: list[Item] = []

    def begin(self) -> Iterator[bytes]:
        """Yield the first events."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def write(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events of a delta."""
        if delta.reasoning:
            yield from self._text(delta.reasoning, ReasoningItem)
        if delta.content:
            yield from self._text(delta.content, MessageItem)
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def end(self, response: Response, status: ItemStatus) -> Iterator[bytes]:
        """Yield the last events; `response` is complete but for its items, whose last one has `status`."""
        yield from self._close(status)
        kind = "incomplete" if response.status in ("incomplete", "cancelled") else response.status
        yield self._event(f"response.{kind}", response=msgspec.structs.replace(response, output=self.items))

    def _text(self, text: str, kind: type[ReasoningItem] | type[MessageItem]) -> Iterator[bytes]:
        if not isinstance(self._open, kind):
            item = ReasoningItem(new_id("rs"), [], "in_progress") if kind is ReasoningItem else _empty_message()
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
        yield self._event("response.output_item.added", output_index=len(self.items), item=item)

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
        yield self._event("response.output_item.done", output_index=len(self.items), item=closed)
        self.items.append(closed)
        self._open = None

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event of the open item; only text has parts, and one part per item."""
        assert self._open is not None
        index = {} if isinstance(self._open, FunctionCallItem) else {"content_index": 0}
        return self._event(kind, item_id=self._open.id, output_index=len(self.items), **index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _empty_message() -> MessageItem:
    return MessageItem(new_id("msg"), [], "in_progress")


def _part(item: Item, text: str) -> OutputText | ReasoningText:
    return ReasoningText(text) if isinstance(item, ReasoningItem) else OutputText(text)


def _logprobs(item: Item) -> dict[str, list[None]]:
    return {"logprobs": []} if isinstance(item, MessageItem) else {}
