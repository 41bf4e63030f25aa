"""A tokenizer out of a GGUF file's metadata.

The keys are those of the GGUF specification (`tokenizer.ggml.*`). What the file does not hold, how text is cut before
the merges apply, is known by the name in `tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from fastgen.config import ConfigError

# Token types of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4

_WORDS_LIKE_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_LIKE_QWEN2 = _WORDS_LIKE_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _plain_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _cut_like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cut_digits_then_like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _cut_like_gpt2()])


def _cut_like_llama3() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS_LIKE_LLAMA3), "isolated"), _plain_bytes()])


def _cut_like_qwen2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS_LIKE_QWEN2), "isolated"), _plain_bytes()])


_CUTS = {
    "gpt-2": _cut_like_gpt2,
    "smollm": _cut_digits_then_like_gpt2,
    "starcoder": _cut_digits_then_like_gpt2,
    "refact": _cut_digits_then_like_gpt2,
    "llama-bpe": _cut_like_llama3,
    "llama3": _cut_like_llama3,
    "llama-v3": _cut_like_llama3,
    "qwen2": _cut_like_qwen2,
}
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})


def build(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that the metadata describes.

    Raises:
        ConfigError: for a kind of tokenizer, or a way to cut text, that is not known here, and where a key is missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentence_piece(metadata)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model {kind!r}: not served; gpt2 (byte-level BPE) and llama (SentencePiece) are"
        )
    _add_marked_tokens(backend, metadata)
    _add_ends(backend, metadata)
    return backend


def _key(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise ConfigError(f"tokenizer.ggml.{name}: the GGUF file lacks it; convert the model again") from None


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _CUTS:
        raise ConfigError(f"tokenizer.ggml.pre {pre!r}: not served; one of {', '.join(sorted(_CUTS))} is")
    vocabulary = {token: token_id for token_id, token in enumerate(_key(metadata, "tokens"))}
    merges = [_pair(merge) for merge in _key(metadata, "merges")]
    # Llama 3 takes a word that is a token as it is, even where the merges would not lead to it.
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = _CUTS[pre]()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentence_piece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the merges follow from the scores; bytes stand in for unknown characters."""
    tokens: Sequence[str] = _key(metadata, "tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_of_scores(tokens, _key(metadata, "scores"))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    strip: list[decoders.Decoder] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("\u2581"))
        strip = [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best-scored token first."""
    known = {token: token_id for token_id, token in enumerate(tokens)}
    best_first = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[token_id] for token_id in best_first)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _add_marked_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control and user-defined tokens stay whole wherever they stand in a text."""
    tokens: Sequence[str] = _key(metadata, "tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    special, plain = [], []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Puts the beginning and end tokens around a prompt, where the file says so."""
    pre, kind = metadata.get("tokenizer.ggml.pre"), metadata["tokenizer.ggml.model"]
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3_NAMES)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    tokens: Sequence[str] = _key(metadata, "tokens")
    first = [_key(metadata, "bos_token_id")] if begins else []
    last = [_key(metadata, "eos_token_id")] if ends else []
    if not first and not last:
        return
    ids = dict.fromkeys(chain(first, last))
    backend.post_processor = processors.TemplateProcessing(
        single=[*(tokens[i] for i in first), "$A", *(tokens[i] for i in last)],
        special_tokens=[(tokens[i], i) for i in ids],
    )
