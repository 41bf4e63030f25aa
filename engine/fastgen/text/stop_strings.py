"""Find stop strings in a stream of text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from fastgen.core.request_error import RequestError

# A server accepts 64 stop strings in a request, whose generations share them.
_STOPS_KEPT = 1024


class StopStrings:
    """Passes text on until a stop string is complete, independently of how the text is split.

    The first complete stop string counts; of several that are complete at the same character, the longest. Only text
    that may become a stop string is held back. A character costs each stop string constant time on average (the
    algorithm of Knuth, Morris and Pratt), however long and alike the stop strings are: clients choose them.
    """

    __slots__ = ("_borders", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # leading characters of each stop string that end the text
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to pass on, and the stop string found or None; push nothing after a match."""
        if not self._stops:
            return text, None
        found = [(end, -len(stop), stop) for place, stop in enumerate(self._stops) if (end := self._find(place, text))]
        if found:
            end, _, stop = min(found)
            shown = (self._held + text[:end])[: -len(stop)]
            self._held = ""
            return shown, stop
        return self._hold(text), None

    def let_pass(self, text: str) -> str:
        """Return the text to pass on while stopping is not allowed; a match may still start in it."""
        if not self._stops:
            return text
        for place in range(len(self._stops)):
            rest = text
            while end := self._find(place, rest):
                rest = rest[end:]
        return self._hold(text)

    def finish(self) -> str:
        """Return the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, place: int, text: str) -> int:
        """Return the number of characters of `text` up to the end of a stop string; 0 if it does not end there."""
        stop, borders, matched = self._stops[place], self._borders[place], self._matched[place]
        if not matched and stop[0] not in text:
            return 0
        for end, character in enumerate(text, 1):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                self._matched[place] = borders[-1]
                return end
        self._matched[place] = matched
        return 0

    def _hold(self, text: str) -> str:
        text = self._held + text
        num_shown = len(text) - max(self._matched)
        self._held = text[num_shown:]
        return text[:num_shown]


@lru_cache(_STOPS_KEPT)
def _borders(stop: str) -> array[int]:
    """Return for each beginning of `stop` the length of its longest end that is a shorter beginning."""
    borders, length = array("I", [0]), 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return borders


def possible_start(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`, which is short."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def given_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Check the argument `stop` of the Python API and return it as a tuple; empty for None.

    Raises:
        RequestError: if it is neither a string nor a list or tuple of strings, or if one is empty.
    """
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(each, str) for each in stops):
        raise RequestError("stop: must be a stop string or a list of them", "stop")
    if not all(stops):
        raise RequestError("stop: contains an empty stop string; leave it out", "stop")
    return tuple(stops)
