"""The bytes of each token.

A token is not text: a character may span tokens. With bytes per token, decoding is concatenation, which is what makes
incremental output exact and linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import tokenizers

from fastgen.settings import ConfigError


def byte_alphabet() -> dict[int, str]:
    """Return the printable character of each byte in byte-level BPE (GPT-2's `bytes_to_unicode`).

    Printable Latin-1 stands for itself; the other bytes get the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: chr(byte) if byte in printable else moved[byte] for byte in range(256)}


class Spelling(Enum):
    """How a vocabulary spells bytes as characters."""

    BYTE_LEVEL = "byte-level"  # each character is a byte: GPT-2, Llama 3, SmolLM
    SENTENCE_PIECE = "SentencePiece"  # U+2581 is a space, <0xE2> is a byte: Llama 2, Mistral


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class Vocabulary:
    """The bytes of token ids, computed on first use.

    Args:
        backend: the tokenizer.
        spelled: bytes of tokens that do not follow its spelling.

    Attributes:
        spelling: how tokens spell bytes.
        drops_first_space: whether decoding drops a leading space, which encoding has added.
        added_tokens: ids of the added tokens, special ones included, by their spelling.
        special_tokens: ids of the special tokens by their spelling.
        special_ids: the same ids as a set.

    Raises:
        ConfigError: if the tokenizer's decoder has neither spelling, or an unsupported step.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spelled: Mapping[int, bytes] | None = None) -> None:
        self._backend = backend
        steps = _decoder_steps(backend)
        self.spelling = _spelling_of(steps)
        self.drops_first_space = any(_drops_first_space(step) for step in steps)
        self._byte_of = {character: byte for byte, character in byte_alphabet().items()}
        self._known: dict[int, bytes] = dict(spelled or {})
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_tokens: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self.special_ids = frozenset(self.special_tokens.values())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an unused id."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.spelling is Spelling.BYTE_LEVEL:
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return token.encode()  # an added token is spelled literally
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match.group(1), 16)])
        return token.replace(_SPACE, " ").encode()


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    # tokenizers exposes the parts of a decoder only by pickling it, as JSON.
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = [] if decoder is None else decoder.get("decoders", [decoder])
    return steps


def _spelling_of(steps: Sequence[dict[str, Any]]) -> Spelling:
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling.BYTE_LEVEL
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        for place, step in enumerate(steps):
            if not _is_known(step, kinds[:place]):
                raise ConfigError(f"tokenizer: the step {json.dumps(step)} of its decoder is not supported")
        return Spelling.SENTENCE_PIECE
    raise ConfigError(
        f"tokenizer: its decoder is {'+'.join(kinds) or 'missing'}, which is not supported; only "
        "byte-level BPE and SentencePiece-like BPE are"
    )


def _is_known(step: Mapping[str, Any], before: Sequence[str]) -> bool:
    """Return whether a step of a decoder, after those in `before`, does what `Vocabulary` does for SentencePiece."""
    match step:
        case {"type": "Metaspace"}:
            return bool(step.get("replacement", _SPACE) == _SPACE)
        case {"type": "Replace", "pattern": {"String": text}, "content": " "}:
            return bool(text == _SPACE)
        case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
            return "Fuse" in before  # otherwise it strips each token
    return step["type"] in ("ByteFallback", "Fuse")


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("content") == " " and step.get("start"))
