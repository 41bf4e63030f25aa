"""Incremental detokenization."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from fastgen.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one generation incrementally; output is final and never ends inside a character.

    The cost of a token is proportional to its length. The concatenated output is the text of the generation as a
    continuation of its prompt: with SentencePiece, the first word keeps the space that separates it from the prompt.

    `hidden` are the tokens that produce no text, by default all special tokens.
    """

    __slots__ = ("_bytes_so_far", "_hidden", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] | None = None) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._hidden = tokenizer.special_token_ids if hidden is None else hidden
        self._bytes_so_far = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; hidden tokens produce none."""
        spelled = b"".join(self._vocabulary.token_bytes(i) for i in token_ids if i not in self._hidden)
        return self._bytes_so_far.decode(spelled)

    def finish(self) -> str:
        """Return the rest: U+FFFD if the generation ended inside a character."""
        return self._bytes_so_far.decode(b"", final=True)
