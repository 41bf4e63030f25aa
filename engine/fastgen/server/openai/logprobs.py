"""Log-probabilities as clients read them: tokens as text, in the shapes of OpenAI's two endpoints and of vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer

_LEAST = -9999.0  # OpenAI's figure for a token that cannot come: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written.

    Attributes:
        as_ids: `token_id:17` in place of the text, which several tokens may share.
    """

    tokenizer: Tokenizer
    as_ids: bool

    def spelled(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self.tokenizer.vocabulary.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """The token's text; what is no whole character shows as U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.spelled(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """The token's text, or its bytes where it is no text: as a key it must tell tokens apart."""
        if self.as_ids:
            return f"token_id:{token_id}"
        spelled = self.spelled(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionLikelihoods:
    """Writes one choice's log-probabilities, piece by piece; it keeps count of where in the text a token begins.

    `hidden` are the tokens that give no text.
    """

    def __init__(self, names: TokenNames, hidden: frozenset[int]) -> None:
        self._names = names
        self._detokenizer = Detokenizer(names.tokenizer, hidden)
        self._offset = 0

    def of_prompt(self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of a prompt that is echoed as `text`: nothing comes before its first token."""
        offsets = self._offsets(text, token_ids)
        rest = self._written(entries, offsets[1:])
        self._offset = len(text)
        return CompletionLogprobs(
            [self._names.key(token_ids[0]), *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            offsets,
        )

    def of(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Of the next tokens."""
        return self._written(entries, [self._advance(entry.token_id) for entry in entries])

    def _written(self, entries: Sequence[TokenLogprobs], offsets: list[int]) -> CompletionLogprobs:
        names = self._names
        return CompletionLogprobs(
            [names.key(entry.token_id) for entry in entries],
            [_finite(entry.logprob) for entry in entries],
            [
                # The token itself is among them, be it likely or not.
                {
                    names.key(token): _finite(logprob)
                    for token, logprob in (*_rivals(entry), (entry.token_id, entry.logprob))
                }
                for entry in entries
            ],
            offsets,
        )

    def _offsets(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Where the tokens of a prompt begin in it.

        The text is the client's own, so it may have special tokens written out, and lacks what encoding has put around
        and before it: marks, and a first space.
        """
        detokenizer, place, offsets = Detokenizer(self._names.tokenizer, frozenset()), 0, []
        for token_id in token_ids:
            offsets.append(place)
            piece = detokenizer.push([token_id])
            if text.startswith(piece, place):
                place += len(piece)
            elif text.startswith(piece.removeprefix(" "), place):
                place += len(piece) - 1
            elif token_id not in self._names.tokenizer.special_token_ids:  # encoding has made other characters of it
                place = min(len(text), place + len(piece))
        return offsets

    def _advance(self, token_id: int) -> int:
        before = self._offset
        self._offset += len(self._detokenizer.push([token_id]))
        return before


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Of an answer's tokens."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(names.text(token_id), _finite(logprob), list(names.spelled(token_id)))

    return ChatLogprobs(
        [
            TokenLogprob(
                names.text(entry.token_id),
                _finite(entry.logprob),
                list(names.spelled(entry.token_id)),
                [top(token_id, logprob) for token_id, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Of a prompt's tokens, as vLLM tells them: by token id, with ranks."""

    def candidates(entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token): PromptLogprob(_finite(logprob), rank, names.text(token))
            for token, (logprob, rank) in ranked.items()
        }

    return [None, *(candidates(entry) for entry in entries)]


def _rivals(entry: TokenLogprobs) -> tuple[tuple[int, float], ...]:
    return tuple(pair for pair in entry.top if pair[0] != entry.token_id)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
