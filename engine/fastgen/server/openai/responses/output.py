"""Output items of a response in the order of the generation, and the stream events that report them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from fastgen.server.openai.chat.choices import call_id, chat_finish_reason
from fastgen.server.openai.responses.objects import (
    FunctionCallItem,
    Item,
    ItemStatus,
    MessageItem,
    ReasoningItem,
    ReasoningPart,
    TextPart,
    new_id,
)
from fastgen.text.output_events import CallArguments, CallBegun, Content, OutputEvent, Reasoning
from fastgen.text.output_parser import OutputParser
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta

# Events of the text of an item, by the item's type.
_TEXT_EVENTS = {
    ReasoningItem: "reasoning_text",
    MessageItem: "output_text",
    FunctionCallItem: "function_call_arguments",
}


@dataclass(frozen=True, slots=True)
class ItemEvent:
    """An event of a stream, without its number."""

    kind: str
    fields: dict[str, Any]


class Output:
    """The items of one generation. Each is closed when the next one begins.

    Text before and after a call is two messages, in a stream and in a complete response.

    Attributes:
        items: the closed items.
        finish_reason: why the generation ended, as in chat completions; None before.
    """

    def __init__(self, rendered: RenderedRequest) -> None:
        self.items: list[Item] = []
        self.finish_reason: str | None = None
        self._rendered = rendered
        self._parser = OutputParser(rendered)
        self._open: Item | None = None
        self._pieces: list[str] = []

    def add(self, delta: OutputDelta) -> list[ItemEvent]:
        """Add a delta of the generation and return its events."""
        events = [change for event in self._parser.push(delta) for change in self._changes(event)]
        self.finish_reason = chat_finish_reason(self._parser, delta)
        return events

    def close(self, status: ItemStatus) -> list[ItemEvent]:
        """Close the open item, if any, with this status. A call that a stop string or token cut is incomplete."""
        is_cut = self.finish_reason == "stop" and isinstance(self._open, FunctionCallItem)
        return list(self._close("incomplete" if is_cut else status))

    def _changes(self, event: OutputEvent) -> Iterator[ItemEvent]:
        match event:
            case Reasoning(text):
                if self._rendered.include_reasoning:
                    yield from self._text(text, ReasoningItem)
            case Content(text):
                yield from self._text(text, MessageItem)
            case CallBegun(_, name):
                yield from self._begin(FunctionCallItem(new_id("fc"), call_id(self._rendered), name, "", "in_progress"))
            case CallArguments(_, text):
                yield self._delta(text)

    def _text(self, text: str, kind: type[ReasoningItem] | type[MessageItem]) -> Iterator[ItemEvent]:
        if not isinstance(self._open, kind):
            item = kind(new_id("rs" if kind is ReasoningItem else "msg"), [], "in_progress")
            yield from self._begin(item)
            yield self._part_event("response.content_part.added", part=_part(item, ""))
        yield self._delta(text)

    def _begin(self, item: Item) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        self._open, self._pieces = item, []
        yield self._item_event("response.output_item.added", item)

    def _delta(self, text: str) -> ItemEvent:
        assert self._open is not None
        self._pieces.append(text)
        kind = _TEXT_EVENTS[type(self._open)]
        return self._part_event(f"response.{kind}.delta", delta=text, **_logprobs(self._open))

    def _close(self, status: ItemStatus) -> Iterator[ItemEvent]:
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
        yield self._item_event("response.output_item.done", closed)
        self.items.append(closed)
        self._open = None

    def _item_event(self, kind: str, item: Item) -> ItemEvent:
        return ItemEvent(kind, {"output_index": len(self.items), "item": item})

    def _part_event(self, kind: str, **fields: Any) -> ItemEvent:
        """Return an event of the open item. Items of text have one part; function calls have none."""
        assert self._open is not None
        index = {} if isinstance(self._open, FunctionCallItem) else {"content_index": 0}
        return ItemEvent(kind, {"item_id": self._open.id, "output_index": len(self.items), **index, **fields})


def _part(item: Item, text: str) -> TextPart | ReasoningPart:
    return ReasoningPart(text) if isinstance(item, ReasoningItem) else TextPart(text)


def _logprobs(item: Item) -> dict[str, list[None]]:
    return {"logprobs": []} if isinstance(item, MessageItem) else {}
