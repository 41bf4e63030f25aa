"""Compile grammars with llguidance, and build its tables of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.lark_tokens import tokens
from fastgen.text.grammars.limits import MOST_GRAMMAR_BYTES
from fastgen.text.grammars.schemas.normalize import normalized

# White space between JSON tokens. Without a bound, a small model may emit it forever.
JSON_SPACE = r"[ \t\n\r]{0,20}"
# The library looks ahead for text that must follow. In `start: T "a"` with `T: /(ab)+/`, where each "a" belongs to T,
# that text has no end, and neither has the search. The last declaration applies.
_UNFORCED = '\n%llguidance {"no_forcing": true}\n'

# Most bytes of a token in the library's tables: the depth of its tree, less the byte before special tokens.
_LONGEST_TOKEN = 1023

# The fault of a grammar without a match.
NO_MATCH = "nothing can match it"

_OPTIONS = "x-guidance"  # the library's options, in a schema

# Name of each kind of grammar in messages, and the request field that holds it.
_NAMES = {
    "json_schema": ("the JSON schema", "response_format"),
    "json_object": ("the JSON object", "response_format"),
    "regex": ("the regular expression", "guided_regex"),
    "lark": ("the grammar", "guided_grammar"),
}


class InvalidGrammar(RequestError):
    """A grammar that cannot be enforced. `param` is the field that such a grammar usually comes from.

    Attributes:
        fault: what is wrong with it.
    """

    def __init__(self, grammar: Grammar, fault: str) -> None:
        name, param = _NAMES[grammar.kind]
        super().__init__(f"{name} cannot be used: {fault}", param)
        self.fault = fault


def check_text(grammar: Grammar) -> None:
    """Raise InvalidGrammar if a grammar has too many bytes, or is not valid text."""
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MOST_GRAMMAR_BYTES:
        raise InvalidGrammar(
            grammar, f"it has {num_bytes} bytes, and at most {MOST_GRAMMAR_BYTES} are accepted; shorten it"
        )
    try:
        grammar.text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar(grammar, "it contains a lone surrogate, which is not a character; remove it") from None


def compile_grammar(
    grammar: Grammar, tokenizer: llguidance.LLTokenizer, limits: llguidance.LLParserLimits
) -> llguidance.LLMatcher:
    """Return a matcher in its initial state.

    The library overflows the stack on deep grammars: call it in a thread with a large one (`large_stacks`).

    Raises:
        InvalidGrammar: if the grammar is invalid, with the reason.
    """
    matcher = llguidance.LLMatcher(tokenizer, _serialised(grammar), log_level=0, limits=limits)
    fault = matcher.get_error()
    if not fault:
        # Some errors only show at the first token, for example a grammar that matches nothing.
        probe = matcher.deep_copy()
        some = any(probe.compute_bitmask())
        fault = "" if some and not probe.is_error() else NO_MATCH
    if fault:
        raise InvalidGrammar(grammar, summary(fault))
    return matcher


def _serialised(grammar: Grammar) -> str:
    """Serialize the grammar for llguidance."""
    check_text(grammar)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    try:
        if grammar.kind == "lark":
            return llguidance.LLMatcher.grammar_from_lark(_with_exact_schemas(grammar.text) + _UNFORCED)
        schema = normalized(json.loads(grammar.text)) if grammar.kind == "json_schema" else {"type": "object"}
        # With defaults, llguidance parses the text here instead of pasting it.
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_pattern": JSON_SPACE}
        )
    except RecursionError:
        raise InvalidGrammar(grammar, "it is nested too deeply; flatten it") from None
    except ValueError as error:
        raise InvalidGrammar(grammar, str(error)) from None


def json_part(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression for JSON that matches a normalized schema."""
    return f"%json {json.dumps({_OPTIONS: {'whitespace_pattern': JSON_SPACE}, **schema})}"


def _with_exact_schemas(text: str) -> str:
    """Return a Lark grammar with its schemas normalized, except those that have options of the library.

    Raises:
        SchemaError: if one of them cannot be enforced.
    """
    try:
        parts = [part for _, part in tokens(text)]
        schemas = {part: json.loads(part.removeprefix("%json")) for part in parts if part.startswith("%json")}
    except ValueError:
        return text  # the library says what is wrong
    exact = {
        part: json_part(normalized(schema))
        for part, schema in schemas.items()
        if not isinstance(schema, dict) or _OPTIONS not in schema
    }
    return "".join(exact.get(part, part) for part in parts)


def vocabulary_tables(
    tokens: list[bytes], special: list[int], end_tokens: list[int], encode: Callable[[str], list[int]]
) -> llguidance.LLTokenizer:
    """Return llguidance's tables of a vocabulary.

    If only one text can follow, llguidance encodes it and allows only these tokens. `encode` may add a space before the
    first word and parses special tokens in text; in these cases the longest matching tokens are used instead.

    The library panics on tokens of more than `_LONGEST_TOKEN` bytes. They are left out: other tokens spell their text.
    Special tokens of that length get a shorter name: rules name them by their ids.
    """
    marks = frozenset(special)
    tokens = [
        text if len(text) <= _LONGEST_TOKEN else b"<|%d|>" % token if token in marks else b""
        for token, text in enumerate(tokens)
    ]
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
    """Encode `text` greedily with the longest matching `tokens`, of at most `longest` bytes, until none matches."""
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
    """Return the line of llguidance's message that says what is wrong, at most 300 characters."""
    if fault.startswith("panic"):  # a defect of the library; its message is about its code
        return "the grammar library fails on it; simplify it"
    lines = [line.strip() for line in fault.splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown fault")
    return message.removeprefix("error: ")[:300]
