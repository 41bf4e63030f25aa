"""Events of a tool-call parser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Content: text that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call of the function `name`; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; the pieces form JSON unless the model wrote none, or was cut short."""

    index: int
    text: str


ToolEvent = Content | CallBegun | CallArguments


@dataclass(slots=True)
class ToolCall:
    """One complete call."""

    name: str
    arguments: str = ""


class Collected:
    """A complete generation: its content and its calls in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    def take(self, events: list[ToolEvent]) -> None:
        """Add events in order."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case CallBegun(index, name):
                    self._calls[index] = ToolCall(name)
                case CallArguments(index, text):
                    self._calls[index].arguments += text

    @property
    def content(self) -> str:
        """The content."""
        return "".join(self._content)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls."""
        return [self._calls[index] for index in sorted(self._calls)]
