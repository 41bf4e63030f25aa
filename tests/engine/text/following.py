"""Follow grammars over single bytes: random matches, as a model might generate them."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import dataclass

import llguidance

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.compiler import compile_grammar, vocabulary_tables
from fastgen.text.grammars.limits import limits

_END = 256
_CLOSING = b'"}]'
# Of one match. The engine counts only what exceeds 0.05 s for a token.
_MOST_SECONDS = 3.0
# What the library says when it reaches a limit.
_LIMITS = ("too many states", "too many expressions", "Too many items", "Current row has")


@functools.cache
def byte_tables() -> llguidance.LLTokenizer:
    """Return the tables of a vocabulary of bytes and an end token."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    return vocabulary_tables(tokens, [_END], [_END], lambda text: list(text.encode()))


@dataclass(frozen=True, slots=True)
class Match:
    """A random match.

    Attributes:
        text: its bytes.
        is_complete: whether it ended with the end token, instead of becoming too long.
    """

    text: bytes
    is_complete: bool


class TooComplex(Exception):
    """The engine ends the generation, and its client gets `grammar_too_complex`."""


class DeadEnd(Exception):
    """A generation could not be continued, although all its tokens were allowed and no limit was reached."""


def compiled(grammar: Grammar) -> llguidance.LLMatcher:
    """Compile a grammar as the engine does, over bytes."""
    return compile_grammar(grammar, byte_tables(), limits())


def follow(matcher: llguidance.LLMatcher, source: random.Random, *, most: int = 160) -> Match:
    """Return a random match. It prefers printable text, and after half of its length what closes brackets.

    Raises:
        DeadEnd: if no token is allowed, or an allowed one is rejected.
        TooComplex: if the library reaches a limit, or the masks take more processor time than the engine gives them.
    """
    matcher, text, began = matcher.deep_copy(), bytearray(), time.thread_time()
    for place in range(most):
        if time.thread_time() - began > _MOST_SECONDS:
            raise TooComplex(f"after {len(text)} bytes")
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not bits:
            raise _end(f"after {bytes(text)!r}", matcher)
        choices = [byte for byte in range(256) if bits >> byte & 1]
        if bits >> _END & 1 and (not choices or place > most // 2 or source.random() < 0.4):
            return Match(bytes(text), is_complete=True)
        byte = source.choice(_preferred(choices, source, closes=place > most // 2))
        if not matcher.consume_token(byte):
            raise _end(f"after {bytes(text)!r} and an allowed {byte}", matcher)
        text.append(byte)
    return Match(bytes(text), is_complete=False)


def _end(place: str, matcher: llguidance.LLMatcher) -> TooComplex | DeadEnd:
    error = matcher.get_error()
    return (TooComplex if any(limit in error for limit in _LIMITS) else DeadEnd)(f"{place}: {error}")


def _preferred(choices: list[int], source: random.Random, *, closes: bool) -> list[int]:
    if closes:
        return [byte for byte in choices if byte in _CLOSING] or choices
    if source.random() < 0.9:
        choices = [byte for byte in choices if byte not in b" \t\r\n"] or choices
    if source.random() < 0.5:
        choices = [byte for byte in choices if byte not in b"}]"] or choices
    if source.random() < 0.85:
        choices = [byte for byte in choices if 32 <= byte < 127] or choices
    return choices


def accepts(matcher: llguidance.LLMatcher, text: str) -> bool:
    """Return whether a grammar matches a whole text."""
    matcher, data = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
