"""Harmony, the format of gpt-oss: a generation is a sequence of messages, each on a channel.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning, `final` is the answer, and `commentary` is
text before calls, or a call if the header names a recipient: `to=functions.NAME`, which may also follow the role. The
prompt ends with `<|start|>assistant`. Source: docs/format.md of openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fastgen.text.stop_strings import possible_start

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ROLE = "assistant"
FUNCTIONS = "functions."

_ENDS = (END, CALL, RETURN)
# A message may also end where another header begins.
_BOUNDS = (*_ENDS, START, CHANNEL)
_HEADS = (START, CHANNEL, MESSAGE, "to=")
LONGEST_HEAD = 512
_BOUND = re.compile("|".join(map(re.escape, _BOUNDS)))
_HEAD_MARK = re.compile(rf"\s*(?:{re.escape(START)}|{re.escape(CHANNEL)})")
_CHANNEL_NAME, _RECIPIENT = re.compile(rf"{re.escape(CHANNEL)}\s*(\w*)"), re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Header:
    """What a message is; `recipient` is the function that it calls, None if it calls none."""

    channel: str
    recipient: str | None = None

    @classmethod
    def parse(cls, text: str) -> Header:
        """Parse the text before `<|message|>`. A header that would be too long to write again counts as an answer's."""
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
        name = None if recipient is None or recipient[1] == ROLE else recipient[1]
        header = cls(channel[1] if channel else "", name)
        return header if len(str(header)) <= LONGEST_HEAD else FINAL

    @property
    def is_reasoning(self) -> bool:
        """Whether the message is reasoning."""
        return self.channel == "analysis" and self.recipient is None

    def __str__(self) -> str:
        """Return the header as the model would write it after the role."""
        recipient = "" if self.recipient is None else f" to={self.recipient}"
        return f"{CHANNEL}{self.channel}{recipient}{MESSAGE}"


FINAL, ANALYSIS = Header("final"), Header("analysis")


@dataclass(frozen=True, slots=True)
class Opened:
    """The header of a message has been read."""

    header: Header


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the open message."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The open message has ended."""


Piece = Opened | Text | Closed


class MessageReader:
    """Splits one generation into pieces of messages, however its text is cut.

    Text in place of a header belongs to an answer, because a model may forget the header.

    Args:
        header: of the message that is open at the beginning; None if a header comes first.
        between: of text after the end of a message; None if a header is expected there.

    Attributes:
        header: of the open message; None where a header is expected.
    """

    def __init__(self, header: Header | None = None, between: Header | None = None) -> None:
        self.header = header
        self._between = between
        self._buffer, self._place = "", 0  # the text, and where the unconsumed part begins

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that this text completes."""
        self._buffer, self._place = self._buffer[self._place :] + text, 0
        return list(self._pieces(ended=False))

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the generation. An incomplete header is dropped."""
        rest = self._buffer[self._place :]
        if self.header is None and rest.strip() and not any(mark in rest for mark in MARKS):
            self._buffer, self._place = "", 0
            return [Opened(FINAL), Text(rest)]
        return list(self._pieces(ended=True))

    def _pieces(self, *, ended: bool) -> Iterator[Piece]:
        while True:
            if self.header is None:
                header = self._read_header()
                if header is None:
                    return
                self.header = header
                yield Opened(header)
            text, end = self._take(ended=ended)
            if text:
                yield Text(text)
            if end is None:
                return
            self.header = self._between if end else None
            yield Closed()
            if self.header is not None:
                yield Opened(self.header)

    def _read_header(self) -> Header | None:
        """Consume a header; None if it is not complete."""
        limit = self._place + LONGEST_HEAD
        end = self._buffer.find(MESSAGE, self._place, limit + len(MESSAGE))
        if end >= 0 and _is_head(head := self._buffer[self._place : end]):
            self._place = end + len(MESSAGE)
            return Header.parse(head)
        if len(self._buffer) < limit + len(MESSAGE) and may_be_head(self._buffer[self._place : limit]):
            return None
        # Drop the mark: it would end the answer at once and begin the same header again.
        if mark := _HEAD_MARK.match(self._buffer, self._place):
            self._place = mark.end()
        return FINAL

    def _take(self, *, ended: bool) -> tuple[str, str | None]:
        """Consume the text that certainly belongs to the open message, and the mark that ends it.

        Return both. The mark is "" if the next header ends the message, and None if the message has not ended.
        """
        place, bound = self._place, _BOUND.search(self._buffer, self._place)
        if bound is not None:
            end = bound[0] if bound[0] in _ENDS else ""
            self._place = bound.end() if end else bound.start()
            return self._buffer[place : bound.start()], end
        keep = 0 if ended else max(possible_start(self._buffer[place:], mark) for mark in _BOUNDS)
        self._place = len(self._buffer) - keep
        return self._buffer[place : self._place], None


def may_be_head(text: str) -> bool:
    """Return whether `text` may be a header or the beginning of one."""
    body = text.lstrip()
    return len(text) <= LONGEST_HEAD and any(body.startswith(head) or head.startswith(body) for head in _HEADS)


def _is_head(text: str) -> bool:
    """Return whether `text`, which `<|message|>` follows, is a header."""
    body = text.strip()
    return not body or body.startswith(_HEADS)
