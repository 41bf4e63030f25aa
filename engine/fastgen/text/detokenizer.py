"""Incremental detokenization."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from fastgen.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes


class Detokenizer:
    """Decodes one generation incrementally; output is final and never ends inside a character.

    The cost of a token is proportional to its length. The concatenated output is the text of the generation as a
    continuation of its prompt: with SentencePiece, the first word keeps the space that separates it from the prompt.

    `hidden` are the tokens that produce no text, by default all special tokens. `incomplete` are the first bytes of a
    character that the generation completes, see `incomplete_end`.
    """

    __slots__ = ("_hidden", "_incomplete", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] | None = None, incomplete: bytes = b"") -> None:
        self._vocabulary = tokenizer.vocabulary
        self._hidden = tokenizer.special_token_ids if hidden is None else hidden
        self._incomplete = incomplete  # the bytes of a character whose end has not come yet

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; hidden tokens produce none."""
        token_bytes, hidden = self._vocabulary.token_bytes, self._hidden
        pieces = [token_bytes(token_id) for token_id in token_ids if token_id not in hidden]
        spelled = b"".join([self._incomplete, *pieces])
        # As `codecs.getincrementaldecoder("utf-8")` does, at a third of its cost per token.
        text, num_decoded = utf_8_decode(spelled, "replace", False)
        self._incomplete = spelled[num_decoded:]
        return text

    def num_before(self, token_id: int) -> int:
        """Return how many characters of the next `push` precede the token's own text.

        It is 1 if an incomplete character comes first and the token does not continue it.
        """
        first = b"" if token_id in self._hidden else self._vocabulary.token_bytes(token_id)[:1]
        try:
            utf_8_decode(self._incomplete + first, "strict", False)
        except UnicodeDecodeError:
            return int(bool(self._incomplete))
        return 0

    def finish(self) -> str:
        """Return the rest: U+FFFD if the generation ended inside a character."""
        text, self._incomplete = self._incomplete.decode(errors="replace"), b""
        return text


def incomplete_end(token_ids: Sequence[int], tokenizer: Tokenizer, hidden: frozenset[int]) -> bytes:
    """Return the bytes at the end of a text that begin a character and do not complete it."""
    ending = b""
    for token_id in reversed(token_ids):
        if len(ending) >= _LONGEST_CHARACTER:
            break
        ending = (b"" if token_id in hidden else tokenizer.vocabulary.token_bytes(token_id)) + ending
    return ending[utf_8_decode(ending, "replace", False)[1] :]
