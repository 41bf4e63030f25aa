"""Find stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, independently of how the text is split.

    The first complete stop string counts; of several that are complete at the same character, the longest. Only text
    that may become a stop string is held back.
    """

    __slots__ = ("_held", "_num_passed", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self._num_passed = 0  # leading characters of the held text that cannot be part of a match

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to pass on and the stop string found; push nothing after a match."""
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
        """Return the text to pass on while stopping is not allowed; a match may still start in it."""
        if not self._stops:
            return text
        shown = self._hold(self._held + text)
        self._num_passed = len(self._held)
        return shown

    def _find(self, stop: str, text: str) -> int:
        """Return the start of a stop string that completes after stopping is allowed; else -1."""
        return text.find(stop, max(0, self._num_passed - len(stop) + 1))

    def _hold(self, text: str) -> str:
        keep = max(possible_start(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self._num_passed = max(0, self._num_passed - (len(text) - keep))
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the held text, which is no stop string."""
        held, self._held = self._held, ""
        return held


def possible_start(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
