"""Logprobs in the formats of completions, of chat completions and of vLLM's prompt_logprobs."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.openai.response_bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from fastgen.text.detokenizer import Detokenizer, incomplete_end
from fastgen.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenText:
    """Writes tokens as text or, because several tokens may share a text, as `token_id:17`."""

    tokenizer: Tokenizer
    as_ids: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes."""
        return self.tokenizer.vocabulary.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """Return the token's text; incomplete characters become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.token_bytes(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """Return the token's key in `top_logprobs`: its text, or its bytes if they are not valid UTF-8."""
        if self.as_ids:
            return f"token_id:{token_id}"
        spelling = self.token_bytes(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice with each token's offset in the text. `hidden` tokens give no text."""

    def __init__(self, token_text: TokenText, hidden: frozenset[int]) -> None:
        self._token_text = token_text
        self._hidden = hidden
        self._detokenizer = Detokenizer(token_text.tokenizer, hidden)
        self._offset = 0

    def write_prompt(
        self, text: str, offsets: list[int], token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs:
        """Return the logprobs of a prompt echoed as `text` with these offsets; its first token has none.

        The first generated tokens may complete a character of the prompt.
        """
        incomplete = incomplete_end(token_ids, self._token_text.tokenizer, self._hidden)
        self._detokenizer = Detokenizer(self._token_text.tokenizer, self._hidden, incomplete)
        self._offset = len(text)
        first = CompletionLogprobs([self._token_text.key(token_ids[0])], [None], [None], offsets[:1])
        return concatenate(first, self._write(entries, offsets[1:]))

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the logprobs of the next generated tokens."""
        return self._write(entries, [self._advance(entry.token_id) for entry in entries])

    def _write(self, entries: Sequence[TokenLogprobs], offsets: list[int]) -> CompletionLogprobs:
        key = self._token_text.key
        return CompletionLogprobs(
            [key(entry.token_id) for entry in entries],
            [_finite(entry.logprob) for entry in entries],
            # OpenAI lists the generated token too, even if it is not among the most likely.
            [
                {
                    **{key(token): _finite(logprob) for token, logprob in entry.top if token != entry.token_id},
                    key(entry.token_id): _finite(entry.logprob),
                }
                for entry in entries
            ],
            offsets,
        )

    def _advance(self, token_id: int) -> int:
        """Return the offset of a generated token and advance past its text."""
        before = self._offset + self._detokenizer.num_before(token_id)
        self._offset += len(self._detokenizer.push([token_id]))
        return before


def concatenate(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the logprobs of two consecutive pieces of text."""
    return CompletionLogprobs(*map(operator.add, msgspec.structs.astuple(first), msgspec.structs.astuple(second)))


def chat_logprobs(token_text: TokenText, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the logprobs of generated tokens in the chat format."""

    def written(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return token_text.text(token_id), _finite(logprob), list(token_text.token_bytes(token_id))

    return ChatLogprobs(
        [
            TokenLogprob(*written(entry.token_id, entry.logprob), [TopLogprob(*written(*pair)) for pair in entry.top])
            for entry in entries
        ]
    )


def prompt_logprobs(token_text: TokenText, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Return the logprobs of prompt tokens in vLLM's format: by token id, with ranks; None for the first token."""

    def candidates(entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token_id] = (entry.logprob, entry.rank)
        return {
            str(token): PromptLogprob(_finite(logprob), rank, token_text.text(token))
            for token, (logprob, rank) in ranked.items()
        }

    return [None, *(candidates(entry) for entry in entries)]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
