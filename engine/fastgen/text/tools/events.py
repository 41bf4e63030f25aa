"""What reading an answer for tool calls brings to light, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is for the reader, not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function `name`; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which together are JSON unless the answer is cut short."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """What looked like a call is none after all: `text` is all of it as it was written.

    Who has passed the call on already cannot take it back; who has not shows the text instead.
    """

    index: int
    text: str


ToolEvent = Content | CallBegun | CallArguments | CallBroken


class ToolParser(Protocol):
    """Reads one answer. How its text is cut does not change what is found in it."""

    def push(self, text: str) -> list[ToolEvent]:
        """What has become certain with this text."""

    def finish(self) -> list[ToolEvent]:
        """What is left when the answer has ended."""


@dataclass(slots=True)
class ToolCall:
    """One call, put together."""

    name: str
    arguments: str = ""


class Collected:
    """A whole answer: its content, and its calls in order."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    def take(self, events: list[ToolEvent]) -> None:
        """Takes in what was found."""
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                case CallBegun(index, name):
                    self._calls[index] = ToolCall(name)
                case CallArguments(index, text):
                    self._calls[index].arguments += text
                case CallBroken(index, text):
                    del self._calls[index]
                    self._content.append(text)

    @property
    def content(self) -> str:
        """What is for the reader."""
        return "".join(self._content)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that held."""
        return [self._calls[index] for index in sorted(self._calls)]
