"""Stop strings that name special tokens.

Special tokens have no text in an output, so a stop string such as `<|im_end|>` would never match. Each hidden token
that a stop string names is therefore written into the searched text as a mark: one character that no decoded text
contains. Marks never leave `fastgen.text.output_text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from fastgen.text.vocabulary import Vocabulary

# Lone low surrogates: UTF-8 cannot spell them.
_FIRST_MARK = 0xDC00
_MOST_MARKS = 1024
# The generations of a request have the same stop strings.
_REQUESTS_KEPT = 16


@dataclass(frozen=True, slots=True)
class SpecialStops:
    """Stop strings as given, and with a mark in place of each special token that they name.

    Attributes:
        stops: what to search for: the stop strings as given, then those with marks.
        marks: the mark of each hidden token that a stop string names.
    """

    stops: tuple[str, ...]
    marks: dict[int, str] = field(default_factory=dict)
    _given: dict[str, str] = field(default_factory=dict)  # stop strings by their form with marks

    @classmethod
    @lru_cache(_REQUESTS_KEPT)
    def of(cls, stops: tuple[str, ...], vocabulary: Vocabulary, hidden: frozenset[int]) -> SpecialStops:
        """Find the `hidden` tokens that stop strings name."""
        marks: dict[int, str] = {}
        texts, searched = vocabulary.special_tokens, "\n".join(stops)
        named = [text for text, token in texts.items() if token in hidden and text in searched]
        if not named:
            return cls(stops)
        # The longest first: a token may begin with another's text.
        pattern = re.compile("|".join(re.escape(text) for text in sorted(named, key=len, reverse=True)[:_MOST_MARKS]))

        def mark(match: re.Match[str]) -> str:
            return marks.setdefault(texts[match.group()], chr(_FIRST_MARK + len(marks)))

        given = {pattern.sub(mark, stop): stop for stop in stops}
        return cls((*stops, *(form for form, stop in given.items() if form != stop)), marks, given)

    def as_given(self, found: str) -> str:
        """Return the client's stop string for one of `stops`."""
        return self._given.get(found, found)

    def without_marks(self, text: str) -> str:
        """Return the text that a client sees."""
        return text.translate(dict.fromkeys(map(ord, self.marks.values()))) if self.marks else text
