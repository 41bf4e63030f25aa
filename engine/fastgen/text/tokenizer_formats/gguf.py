"""Build a tokenizer from a GGUF file's metadata.

The keys are those of the GGUF specification (`tokenizer.ggml.*`). The file does not contain the pre-tokenizer, only
its name in `tokenizer.ggml.pre`; see `pre_tokenizers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from fastgen.config import ConfigError
from fastgen.text.tokenizer_formats import huggingface
from fastgen.text.tokenizer_formats.pre_tokenizers import PRE_TOKENIZERS

# Token types of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4

# Phi-3's special tokens strip the white space after them. GGUF files do not contain that; llama.cpp checks the model.
_PHI3 = "<|placeholder1|>"
_PHI3_STRIPPING = frozenset(
    {"</s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", *(f"<|placeholder{n}|>" for n in range(1, 7))}
)


def build(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer that the metadata describes.

    Raises:
        ConfigError: if the tokenizer or pre-tokenizer is not supported, or a key is missing.
    """
    if whole := metadata.get("tokenizer.huggingface.json"):
        return huggingface.read(tokenizers.Tokenizer.from_str, whole, "tokenizer.huggingface.json")
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentence_piece(metadata)
    else:
        raise ConfigError(
            f"tokenizer.ggml.model {kind!r}: not supported; only gpt2 (byte-level BPE) and llama (SentencePiece) are"
        )
    _add_marked_tokens(backend, metadata)
    _add_ends(backend, metadata)
    return backend


def named_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates use by name, such as `bos_token`."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: metadata["tokenizer.ggml.tokens"][i] for name, i in ids.items() if i is not None}


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the unnamed one is the default."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return {name: str(metadata[key]) for name, key in keys.items() if metadata.get(key)}


def _key(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{name}"]
    except KeyError:
        raise ConfigError(f"tokenizer.ggml.{name}: the GGUF file lacks it; convert the model again") from None


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(str(pre))
    if pre_tokenizer is None:
        raise ConfigError(
            f"tokenizer.ggml.pre {pre!r}: not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(_key(metadata, "tokens"))}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _key(metadata, "merges"))]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges))
    backend.pre_tokenizer = pre_tokenizer.make()
    if pre_tokenizer.normalizer is not None:
        backend.normalizer = pre_tokenizer.normalizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build SentencePiece BPE: merges follow from scores, with byte fallback."""
    tokens: Sequence[str] = _key(metadata, "tokens")
    scores: Sequence[float] = _key(metadata, "scores")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    best_first = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    merges = [  # all merges of two tokens into a third
        (token[:cut], token[cut:])
        for token in (tokens[token_id] for token_id in best_first)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
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


def _add_marked_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add control and user-defined tokens, which are never split."""
    tokens: Sequence[str] = _key(metadata, "tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type", ())
    stripping = _PHI3_STRIPPING if _PHI3 in tokens else frozenset()
    special, plain = [], []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            special.append(AddedToken(token, normalized=False, special=True, rstrip=token in stripping))
        elif token_type == _USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False, rstrip=token in stripping))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add BOS and EOS around prompts if the metadata requires them."""
    pre_tokenizer = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))
    is_sentence_piece = metadata["tokenizer.ggml.model"] == "llama"
    default = is_sentence_piece or (pre_tokenizer is not None and pre_tokenizer.adds_bos)
    begins = metadata.get("tokenizer.ggml.add_bos_token", default)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    tokens: Sequence[str] = _key(metadata, "tokens")
    first = [_key(metadata, "bos_token_id")] if begins else []
    last = [_key(metadata, "eos_token_id")] if ends else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in first), "$A", *(tokens[i] for i in last)],
            special_tokens=[(tokens[i], i) for i in dict.fromkeys([*first, *last])],
        )
