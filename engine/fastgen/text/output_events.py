"""What the text of a generation means, piece by piece: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the content: text that is neither reasoning nor part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call of the function `name`; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; the pieces form JSON unless the model wrote it wrongly or was cut short."""

    index: int
    text: str


OutputEvent = Reasoning | Content | CallBegun | CallArguments


@dataclass(slots=True)
class CollectedCall:
    """One call of a complete generation; see `CallArguments` for when the arguments are not JSON."""

    name: str
    arguments: str = ""


class Collected:
    """A complete generation: its reasoning, its content and its calls in order."""

    def __init__(self, events: Iterable[OutputEvent] = ()) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, CollectedCall] = {}
        self.take(events)

    def take(self, events: Iterable[OutputEvent]) -> None:
        """Add events in order."""
        for event in events:
            match event:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case CallBegun(index, name):
                    self._calls[index] = CollectedCall(name)
                case CallArguments(index, text):
                    self._calls[index].arguments += text

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """The content."""
        return "".join(self._content)

    @property
    def calls(self) -> list[CollectedCall]:
        """The calls."""
        return [self._calls[index] for index in sorted(self._calls)]
