"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of the stop strings is complete; the result does not depend on how the text was cut.

    Of several, the one that is complete first counts; of those complete at once, the longest. Only text that may yet
    become a stop string is held back.
    """

    __slots__ = ("_held", "_num_passed", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0  # characters at the beginning of the held text in which nothing might stop

    def push(self, text: str) -> tuple[str, str | None]:
        """The text to pass on, and the stop string that was found. After one is found, push no more."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._find(stop, text)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        return self._hold(text), None

    def let_pass(self, text: str) -> str:
        """The text to pass on where nothing may stop yet: what only begins in it may be complete later."""
        if not self._stops:
            return text
        shown = self._hold(self._held + text)
        self._num_passed = len(self._held)
        return shown

    def _find(self, stop: str, text: str) -> int:
        """Where a stop string begins that was not complete before it might stop anything; else -1."""
        return text.find(stop, max(0, self._num_passed - len(stop) + 1))

    def _hold(self, text: str) -> str:
        keep = max(possible_start(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self._num_passed = max(0, self._num_passed - (len(text) - keep))
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, which is now known to be none of the stop strings."""
        held, self._held = self._held, ""
        return held


def possible_start(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, short of all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
