"""State machine shared by the parsers of all formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

from fastgen.text.output_events import CallBegun, Content, OutputEvent
from fastgen.text.stop_strings import possible_start
from fastgen.text.tools.json_call import CallReader

State = Callable[[], bool]

# Most characters that states see at once of a longer text, white space before them not counted, so that what they give
# back or move is short.
_PIECE = 64

# Text without meaning that models write after a call: surplus brackets, and the end of a code fence.
STRAYS = ("}", "]", "```")


class Machine:
    """Runs states over `buffer`.

    A state consumes text, sets the next state, and returns whether it progressed. White space around calls is not
    content: it is held back until the next text is known.

    The cost of a text is proportional to its length, however it is cut: a state examines the same text again only if it
    is short, and consumes or keeps elsewhere what may grow without bound.

    Attributes:
        buffer: text that no state has consumed.
        ended: whether the generation has ended.
        state: the state to run next.
        num_calls: number of calls started so far.
    """

    def __init__(self, start: State) -> None:
        self.buffer = ""
        self.ended = False
        self.state = start
        self.num_calls = 0
        self._space = ""
        self._spaces: list[str] = []  # white space that no state has seen
        self._head: list[str] = []  # what `take_head` has consumed
        self._dropped: list[str] = []  # strays behind the last mark that `drop` has found
        self._has_mark = False  # whether `drop` has found one
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> list[OutputEvent]:
        """Return the events that this text completes. White space behind text that is held back completes none."""
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            if (self.buffer or self._space) and not piece.strip():
                self._spaces.append(piece)
            else:
                self._read(piece)
        return self._taken()

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events at the end of the generation."""
        self.ended = True
        self._read("")
        events = self._taken()
        return events if self.num_calls or not self._space else [*events, Content(self._space)]

    def show(self, text: str) -> None:
        """Emit `text` as content."""
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if solid:
            self._events.append(Content(solid))

    def read_call(
        self, prefix: str, names: frozenset[str] | None, then: State, otherwise: State, marks: Sequence[str]
    ) -> State:
        """Return a state that parses one call object, which one of `marks` ends at the latest.

        `then` continues if it is a call, `otherwise` if it is not.
        """
        reader = CallReader(self.num_calls, prefix, names, marks)

        def reading() -> bool:
            events, self.buffer = reader.push(self.buffer)
            if self.ended and not reader.done:
                events += reader.finish()
            self.note(events)
            if not reader.done:
                return False
            self.state = then if reader.called else otherwise
            return True

        return reading

    def read_list(
        self,
        prefix: str,
        then: State,
        otherwise: State,
        *,
        marks: Sequence[str],
        names: frozenset[str] | None = None,
        separators: Sequence[str] = (",", "}"),
    ) -> State:
        """Return a state that parses a list of calls, whose opening bracket may be missing, after `prefix`.

        `otherwise` continues if the first item is not a call to one of `names`; `then` continues after the list, and
        after its calls if another item is not one.
        """

        def beginning() -> bool:
            inside = self.buffer.lstrip().removeprefix("[").lstrip()
            if not inside and not self.ended:
                return False
            if inside.startswith("{"):
                read_at(inside, prefix, otherwise)
            else:
                self.show(prefix)
                self.state = otherwise
            return True

        def between() -> bool:
            if self.drop(separators) is None:
                return False
            body = self.buffer.lstrip()
            if body.startswith("{"):
                read_at(body, "", then)
            else:
                self.buffer = body.removeprefix("]") if body.startswith("]") else self.buffer
                self.state = then
            return True

        def read_at(body: str, before: str, if_none: State) -> None:
            shown, self.buffer = before + self.buffer[: len(self.buffer) - len(body)], body
            self.state = self.read_call(shown, names, between, if_none, marks)

        return beginning

    def note(self, events: list[OutputEvent]) -> None:
        """Emit the events of a call parser."""
        for event in events:
            match event:
                case Content(text):
                    self.show(text)
                case CallBegun():
                    self.num_calls += 1
                    self._space = ""
                    self._events.append(event)
                case _:
                    self._events.append(event)

    def take_until(self, marks: Sequence[str]) -> tuple[str, bool]:
        """Consume the text that is certainly before the first of `marks`; return it, and whether a mark is next."""
        places = [place for mark in marks if (place := self.buffer.find(mark)) >= 0]
        keep = 0 if self.ended else max(possible_start(self.buffer, mark) for mark in marks)
        certain = min(places, default=len(self.buffer) - keep)
        taken, self.buffer = self.buffer[:certain], self.buffer[certain:]
        return taken, bool(places)

    def reach(self, marks: Sequence[str], then: State) -> bool:
        """As a state: emit the text before the first of `marks`, then continue with `then`."""
        before, found = self.take_until(marks)
        self.show(before)
        if found:
            self.state = then
        return found

    def seek(self, mark: str, then: State) -> bool:
        """As a state: emit the text before `mark`, consume the mark, then continue with `then`."""
        found = self.reach((mark,), then)
        if found:
            self.buffer = self.buffer.removeprefix(mark)
        return found

    def take_head(self, head: re.Pattern[str], marks: Sequence[str]) -> str | None:
        """Consume and return what `head` matches; None while the next text may belong to it.

        Each of `marks` continues the match.
        """
        found = head.match(self.buffer)
        assert found is not None
        self._head.append(found[0])
        self.buffer = self.buffer[found.end() :]
        if not self.ended and any(mark.startswith(self.buffer) for mark in marks):
            return None
        taken, self._head = "".join(self._head), []
        return taken

    def drop(self, strays: Sequence[str], mark: str = "") -> bool | None:
        """Consume `strays` and `mark`, each in any number and with the white space before it; a mark comes last.

        Without a mark, strays alone are consumed. Return whether there was a mark; None while the next text may belong
        to what is dropped.
        """
        alone, before_mark = _any_number_of(tuple(strays), mark)
        if found := before_mark.match(self.buffer):
            self._has_mark, self._dropped, self.buffer = True, [], self.buffer[found.end() :]
        behind = alone.match(self.buffer)
        assert behind is not None
        self._dropped.append(behind[0])
        self.buffer = self.buffer[behind.end() :]
        rest = self.buffer.lstrip()
        if not self.ended and any(text.startswith(rest) for text in (*strays, mark)):
            return None
        has_mark, dropped = self._has_mark, self._dropped
        self._has_mark, self._dropped = False, []
        if has_mark:  # what is behind the last mark is text
            self.buffer = "".join([*dropped, self.buffer])
        return has_mark

    def _read(self, text: str) -> None:
        """Let the states consume the white space that none has seen, and the text after it."""
        self.buffer, self._spaces = "".join([self.buffer, *self._spaces, text]), []
        while self.state():
            pass

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events


@cache
def _any_number_of(strays: tuple[str, ...], mark: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return expressions of strays alone, and of strays with marks, the last of which is a mark."""
    alone = rf"(?:\s*(?:{'|'.join(map(re.escape, strays))}))*"
    return re.compile(alone), re.compile(rf"(?:{alone}\s*{re.escape(mark)})+" if mark else r"(?!)")
