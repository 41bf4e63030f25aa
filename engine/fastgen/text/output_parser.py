"""Split the text of one generation into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import msgspec

from fastgen.text.output_events import CallArguments, CallBegun, Content, OutputEvent, Reasoning
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta
from fastgen.text.spelled_marks import unguarded


class OutputParser:
    """Turns the deltas of one generation into events. Calls beyond `max_calls` are dropped."""

    def __init__(self, rendered: RenderedRequest) -> None:
        reasoning, tool_format = rendered.reasoning, rendered.tool_format
        self._reasoning = None if reasoning is None else reasoning.parser(rendered.start)
        self._tools = None if tool_format is None else tool_format.parser(rendered.tools)
        self._max_calls = rendered.max_calls
        self._last_arguments: list[str] | None = None  # of the last call, if any

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self._reasoning is None and self._tools is None

    def push(self, delta: OutputDelta) -> list[OutputEvent]:
        """Return the events that this delta completes."""
        events: list[OutputEvent] = []
        text, is_last = delta.text, delta.finish_reason is not None
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            if is_last:
                more_thought, more_text = self._reasoning.finish()
                thought, text = thought + more_thought, text + more_text
            if thought := unguarded(thought):
                events.append(Reasoning(thought))
        if self._tools is None:
            content = unguarded(text)
            return [*events, Content(content)] if content else events
        found = self._tools.push(text)
        if is_last:
            found += self._tools.finish()
        events += _shown([event for event in found if self._is_allowed(event)])
        for event in events:
            if isinstance(event, CallBegun):
                self._last_arguments = []
            elif isinstance(event, CallArguments) and self._last_arguments is not None:
                self._last_arguments.append(event.text)
        return events

    def ends_with_call(self, stop_reason: str | int | None) -> bool:
        """Return whether a generation that has stopped made calls.

        If the client's stop string or token cut the last one, it has not.
        """
        if self._last_arguments is None:
            return False
        return stop_reason is None or _is_json("".join(self._last_arguments))

    def _is_allowed(self, event: OutputEvent) -> bool:
        if self._max_calls is None or isinstance(event, Reasoning | Content):
            return True
        return event.index < self._max_calls


def _shown(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return events without guards, and with neighbouring pieces of one text joined: a parser divides long texts."""
    shown: list[OutputEvent] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if isinstance(first, CallBegun):  # alone: each has another index
            shown.append(replace(first, name=unguarded(first.name)))
            continue
        text = "".join([event.text for event in (first, *others) if not isinstance(event, CallBegun)])
        if text := unguarded(text):
            shown.append(replace(first, text=text))
    return shown


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
