"""Structured output: check and compile grammars with llguidance.

The server process checks a grammar and rejects an invalid one; the engine process enforces it (`constraints`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

from fastgen.core.request import Grammar, RequestError
from fastgen.text.tokenizer import Tokenizer

# White space between JSON tokens. Without a bound, a small model may emit it forever.
JSON_SPACE = r"[ \t\n\r]{0,20}"
# Compiled grammars to cache: the requests of one application share a few.
GRAMMARS_KEPT = 64
# Most bytes of a grammar's text. Together with `_LIMITS` it bounds the time to compile it; see `docs/decisions/022`.
MOST_GRAMMAR_BYTES = 1 << 16
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=100_000, max_lexer_states=100_000)

# Name of each kind of grammar in messages, and the request field that holds it.
_NAMES = {
    "json_schema": ("the JSON schema", "response_format"),
    "json_object": ("the JSON object", "response_format"),
    "regex": ("the regular expression", "guided_regex"),
    "lark": ("the grammar", "guided_grammar"),
}


def escaped(text: str) -> str:
    """Return a text in a regular expression between slashes, as Lark grammars have them."""
    return "".join(f"\\{c}" if c in ".|()[]{}*+?^$/\\" else c for c in text)


def json_body(schema: Mapping[str, Any]) -> str:
    """Return the body of a Lark rule: JSON that matches a schema."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': JSON_SPACE}, **schema})}"


def check_grammar(grammar: Grammar, tokenizer: Tokenizer) -> None:
    """Check a grammar without building tables for the whole vocabulary; takes milliseconds.

    The library releases the GIL, so large grammars can be checked in a thread.

    Raises:
        RequestError: if the grammar is invalid, with the reason.
    """
    if grammar.kind == "tokens":
        return  # the engine checks the ids against the model's vocabulary
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MOST_GRAMMAR_BYTES:
        raise refusal(grammar, f"it has {num_bytes} bytes, and at most {MOST_GRAMMAR_BYTES} are accepted; shorten it")
    # All single bytes, and the special tokens, which a Lark grammar can name.
    special = [tokenizer.vocabulary.token_bytes(token) for token in sorted(tokenizer.special_token_ids)]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<|end of match|>", *special]
    compile_grammar(
        grammar, vocabulary_tables(tokens, list(range(256, len(tokens))), [256], lambda text: list(text.encode()))
    )


def compile_grammar(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Return a matcher in its initial state.

    Raises:
        RequestError: if the grammar is invalid, with the reason.
    """
    matcher = llguidance.LLMatcher(tokenizer, _serialised(grammar), log_level=0, limits=_LIMITS)
    fault = matcher.get_error()
    if not fault:
        # Some errors only show at the first token, for example a grammar that matches nothing.
        probe = matcher.deep_copy()
        some = any(probe.compute_bitmask())
        fault = "" if some and not probe.is_error() else "nothing can match it"
    if fault:
        raise refusal(grammar, summary(fault))
    return matcher


def _serialised(grammar: Grammar) -> str:
    """Serialize the grammar for llguidance."""
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise refusal(grammar, "it contains a lone surrogate, which is not a character") from None
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        # With defaults, llguidance parses the text here instead of pasting it.
        return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_SPACE})
    except ValueError as error:
        raise refusal(grammar, str(error)) from None


def vocabulary_tables(
    tokens: list[bytes], special: list[int], end_tokens: list[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """Return llguidance's tables of a vocabulary.

    If only one text can follow, llguidance encodes it and allows only these tokens. `encode` may add a space before the
    first word and parses special tokens in text; in these cases the longest matching tokens are used instead.
    """
    marks = frozenset(special)
    text_tokens = {spelling: token for token, spelling in enumerate(tokens) if spelling and token not in marks}
    longest = max(map(len, text_tokens))

    def encode_exactly(text: bytes) -> list[int]:
        ids = encode(text.decode(errors="replace"))
        if b"".join(tokens[token] for token in ids) == text and marks.isdisjoint(ids):
            return ids
        return _encode_greedily(text, text_tokens, longest)

    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens, special, end_tokens[0], encode_exactly))
    # In two calls, because each holds the interpreter's lock: other threads run in between.
    trie = llguidance.LLTokenizer(wrapper, eos_token=end_tokens, slices=[])
    return trie.with_slices(llguidance.LLTokenizer.general_slices())


def _encode_greedily(text: bytes, tokens: Mapping[bytes, int], longest: int) -> list[int]:
    """Encode `text` greedily with the longest matching `tokens`, of at most `longest` bytes."""
    ids, start = [], 0
    while start < len(text):
        pieces = (text[start : start + length] for length in range(min(longest, len(text) - start), 0, -1))
        piece = next((piece for piece in pieces if piece in tokens), None)
        if piece is None:
            break
        ids.append(tokens[piece])
        start += len(piece)
    return ids


@dataclass
class _Vocabulary:
    """The tokenizer attributes that llguidance reads."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[bytes], list[int]]
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.encode(text)


def summary(fault: str) -> str:
    """Return the first line of llguidance's message, which may continue with a drawing."""
    lines = [line.strip() for line in fault.splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown fault")
    return message.removeprefix("error: ")[:300]


def refusal(grammar: Grammar, fault: str) -> RequestError:
    """Return the error that rejects a grammar, under the request's field."""
    name, param = _NAMES[grammar.kind]
    return RequestError(f"{name} cannot be used: {fault}", param)
