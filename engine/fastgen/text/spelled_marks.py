"""Distinguish the marks of reasoning and calls from text that only spells them.

A model whose vocabulary has a token for a mark, such as `<|channel|>` or `</think>`, writes that token where it means
the mark. The same text in other tokens is text: the model quotes the mark, perhaps from a user's message. (vLLM and
SGLang take it for the mark in some formats and ways of reading; openai-harmony, gpt-oss's own parser, does not.)

Parsers look for marks in text. So a guard is inserted before the last character of each mark that other tokens spell,
and removed from what the parsers return. The guard is a lone surrogate, which UTF-8 cannot express: no generated text
contains one. Only a parsed JSON escape can be one, so guards are removed before such text is parsed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from fastgen.text.tokenizer import Tokenizer

GUARD = "\ud800"


class SpelledMarks:
    """Inserts guards into the text of one generation, which comes in pieces.

    Args:
        tokenizer: of the model.
        marks: the marks that parsers look for. Those without a token of their own are never guarded.

    Attributes:
        token_ids: tokens of the marks.
    """

    __slots__ = ("_last", "_longest", "_pattern", "_tail", "token_ids")

    def __init__(self, tokenizer: Tokenizer, marks: Iterable[str]) -> None:
        added = tokenizer.vocabulary.added_tokens
        own = sorted({mark for mark in marks if mark in added})
        self.token_ids = frozenset(added[mark] for mark in own)
        self._pattern = re.compile("|".join(map(re.escape, own)) or r"(?!)")
        self._last = frozenset(mark[-1] for mark in own)
        self._longest = max(map(len, own), default=1)
        self._tail = ""  # the end of the text so far, in which a mark may begin

    def own(self, text: str) -> str:
        """Take the next text, that of a mark's own token, and return it."""
        self._tail = ""
        return text

    def guarded(self, text: str) -> str:
        """Take the next text, of other tokens, and return it with a guard in each mark that it completes."""
        seen, known = self._tail + text, len(self._tail)
        self._tail = seen[1 - self._longest :] if self._longest > 1 else ""
        if self._last.isdisjoint(text):
            return text
        ends = [place for found in self._pattern.finditer(seen) if (place := found.end() - 1 - known) >= 0]
        return GUARD.join(text[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True))


class Guards:
    """Removes guards from text before it is searched, and restores them in what the search passes on."""

    __slots__ = ("_num_put", "_num_taken", "_places")

    def __init__(self) -> None:
        self._places: deque[int] = deque()  # in the text without guards, of those that have not been put back
        self._num_taken = self._num_put = 0  # characters

    def take(self, text: str) -> str:
        """Return the next text without its guards."""
        *before, last = text.split(GUARD)
        for part in before:
            self._num_taken += len(part)
            self._places.append(self._num_taken)
        self._num_taken += len(last)
        return "".join([*before, last])

    def put(self, text: str) -> str:
        """Return the next text that is passed on, with its guards."""
        parts, start = [], 0
        while self._places and self._places[0] <= self._num_put + len(text):
            end = self._places.popleft() - self._num_put
            parts.append(text[start:end])
            start = end
        self._num_put += len(text)
        return GUARD.join([*parts, text[start:]])


def marked_texts(token_ids: Sequence[int], tokenizer: Tokenizer, marks: Iterable[str]) -> Iterator[str]:
    """Yield the text of each token, guarded; a character of several tokens is replaced by U+FFFD."""
    spelled = SpelledMarks(tokenizer, marks)
    for token in token_ids:
        text = tokenizer.vocabulary.token_bytes(token).decode(errors="replace")
        yield spelled.own(text) if token in spelled.token_ids else spelled.guarded(text)


def unguarded(text: str) -> str:
    """Return text without guards."""
    return text.replace(GUARD, "")
