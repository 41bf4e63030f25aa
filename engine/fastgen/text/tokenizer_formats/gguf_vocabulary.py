"""The tokens of a GGUF file, with llama.cpp's corrections of their types and its end-of-generation tokens.

The rules and lists are those of llama.cpp's src/llama-vocab.cpp, read at commit 00ad355e. A file says little about its
special tokens, and often something wrong, so llama.cpp finds most of them by their text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from fastgen.settings import ConfigError

log = logging.getLogger("fastgen.text")


class TokenType(IntEnum):
    """Token types of the GGUF specification."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a generation, whatever their type. llama.cpp makes them control tokens.
_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
# Tokens of code infilling: the key that names one, and the texts to look for without it. All are control tokens.
_INFILLING = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# These end a generation too: they would begin the next file.
_ENDING_INFILLING = ("fim_pad", "fim_rep", "fim_sep")
# Marks within a message of Harmony (gpt-oss), which are shown.
_HARMONY = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})
# A SentencePiece file may leave these ids out.
_SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
_NAMED = ("bos", "eos", "eot", "eom", "unknown", "padding", *_INFILLING)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The tokens of a GGUF file.

    Attributes:
        tokens: texts of all tokens; no two are equal.
        types: their types.
        ids: ids of special tokens by the name in their keys, such as `eos` in `tokenizer.ggml.eos_token_id`.
        end_tokens: tokens that end a generation.
    """

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    end_tokens: frozenset[int] = field(init=False)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> GGUFVocabulary:
        """Read the vocabulary; without `tokenizer.ggml.tokens` it is empty.

        Raises:
            ConfigError: naming the damaged key.
        """
        tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(values(metadata, "tokens", str, ()))]
        if len(set(tokens)) < len(tokens):
            twice, _ = Counter(tokens).most_common(1)[0]
            raise ConfigError(f"tokenizer.ggml.tokens: has the token {twice!r} twice; convert the model again")
        types = values(metadata, "token_type", int, [TokenType.NORMAL] * len(tokens))
        check_length("token_type", types, tokens)
        defaults = _SENTENCE_PIECE_IDS if metadata.get("tokenizer.ggml.model") == "llama" else {}
        found = {name: _special_id(metadata, name, len(tokens), defaults.get(name)) for name in _NAMED}
        ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        return cls(tokens, types[: len(tokens)], ids)

    def __post_init__(self) -> None:
        numbers = {token: number for number, token in enumerate(self.tokens)}
        for name, texts in _INFILLING.items():
            infilling = [numbers[text] for text in texts if text in numbers]
            if name not in self.ids and infilling:
                self.ids[name] = min(infilling)
                self.types[min(infilling)] = TokenType.CONTROL
        marked = {numbers[text] for text in _END_TEXTS if text in numbers}
        for number in marked:
            self.types[number] = TokenType.CONTROL
        for text in _HARMONY & numbers.keys():
            self.types[numbers[text]] = TokenType.USER_DEFINED
        named = [self.ids[name] for name in ("eos", "eot", "eom", *_ENDING_INFILLING) if name in self.ids]
        ends = marked.union(named)
        ending = {self.tokens[number] for number in ends if number < len(self.tokens)}
        if "<|end|>" in ending and _has_messages(ending):
            ends.remove(numbers["<|end|>"])
            self.types[numbers["<|end|>"]] = TokenType.USER_DEFINED
        if {"<|tool_response>", "</s>"} <= ending:  # Gemma 4, where </s> is a tag of HTML
            ends.remove(numbers["</s>"])
            self.types[numbers["</s>"]] = TokenType.NORMAL
        object.__setattr__(self, "end_tokens", frozenset(ends))

    def text_of(self, name: str) -> str | None:
        """Return the text of a special token, such as `bos`; None if there is none."""
        number = self.ids.get(name)
        return self.tokens[number] if number is not None and number < len(self.tokens) else None


def _has_messages(ends: set[str]) -> bool:
    """Return whether <|end|> only ends a message within an answer: in Harmony, and Solar's similar format."""
    calls = bool(ends & {"<|call|>", "<|calls|>"})
    return calls and bool(ends & {"<|return|>", "<|flush|>"})


def values(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return the list `tokenizer.ggml.NAME` of the metadata, whose items have the type `kind`.

    Raises:
        ConfigError: if it is missing and has no default, or has other items.
    """
    key = f"tokenizer.ggml.{name}"
    found = metadata.get(key, default)
    if found is None:
        raise ConfigError(f"{key}: the GGUF file lacks it; convert the model again")
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(found, list | tuple) or not all(
        each in kinds or issubclass(each, kind) for each in set(map(type, found))
    ):
        raise ConfigError(f"{key}: is damaged, a list of {kind.__name__} is expected; convert the model again")
    return list(found)


def flag(metadata: Mapping[str, Any], name: str, default: Callable[[], bool]) -> bool:
    """Return the setting `tokenizer.ggml.NAME`, which is true or false; `default()` if it is missing.

    Raises:
        ConfigError: if it is neither.
    """
    key = f"tokenizer.ggml.{name}"
    found = metadata.get(key)
    if found is None:
        return default()
    if not isinstance(found, bool):
        raise ConfigError(f"{key} is {found!r}: expected true or false; convert the model again")
    return found


def check_length(name: str, found: list[Any], tokens: list[str]) -> None:
    """Check that there is a value for each token.

    Raises:
        ConfigError: if there are fewer.
    """
    if len(found) < len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.{name}: has {len(found)} values for {len(tokens)} tokens; convert the model again"
        )


def _special_id(metadata: Mapping[str, Any], name: str, num_tokens: int, default: int | None) -> int | None:
    """Return the id that a key gives a special token.

    If it gives no valid one, return the default if that is a token, otherwise None.
    Converters write 4294967295, which is -1, for a token that a model does not have.

    Raises:
        ConfigError: if the value is not an integer.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    found = metadata.get(key)
    if found is not None and type(found) is not int:
        raise ConfigError(f"{key} is {found!r}: expected a token id; convert the model again")
    limit = num_tokens or 1 << 31  # a file without tokens may name ids, too
    if found is not None and 0 <= found < limit:
        return int(found)
    if found is not None:
        log.warning("%s is %d, which is not a token: ignored", key, found)
    return default if default is not None and default < num_tokens else None
