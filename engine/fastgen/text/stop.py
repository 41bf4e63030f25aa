"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of the stop strings is complete; the result does not depend on how the text was cut.

    Of several, the one that is complete first counts; of those complete at once, the longest. Only text that may yet
    become a stop string is held back.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text to pass on, and the stop string that was found. After one is found, push no more."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        keep = max(possible_start(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """The text held back, which is now known to be none of the stop strings."""
        held, self._held = self._held, ""
        return held


def possible_start(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, short of all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
