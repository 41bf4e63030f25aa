"""Build a tokenizer from a GGUF file's metadata.

The keys are those of the GGUF specification (`tokenizer.ggml.*`). The file does not contain the pre-tokenizer, only
its name in `tokenizer.ggml.pre`; see `pre_tokenizers`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from fastgen.settings import ConfigError
from fastgen.text.tokenizer_formats import huggingface
from fastgen.text.tokenizer_formats.gguf_vocabulary import GGUFVocabulary, TokenType, check_length, flag, values
from fastgen.text.tokenizer_formats.library import check_encodes, one_line_errors
from fastgen.text.tokenizer_formats.pre_tokenizers import PRE_TOKENIZERS

log = logging.getLogger("fastgen.text")

# Types of tokens whose text in the file is the text that they stand for.
_LITERAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
_SILENT = (TokenType.UNUSED, TokenType.UNDEFINED)
_EMBEDDED = "tokenizer.huggingface.json"

# Phi-3's special tokens strip the white space after them. GGUF files do not contain that; llama.cpp checks the model.
_PHI3 = "<|placeholder1|>"
_PHI3_STRIPPING = frozenset(
    {"</s>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>", *(f"<|placeholder{n}|>" for n in range(1, 7))}
)


def build(metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Return the tokenizer that the metadata describes.

    Raises:
        ConfigError: if the tokenizer or pre-tokenizer is not supported, or a key is missing or damaged.
    """
    if whole := metadata.get(_EMBEDDED):
        backend = huggingface.read(str(whole), _EMBEDDED)
        check_encodes(backend, _EMBEDDED)
        return backend
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"tokenizer.ggml.model {kind!r}: not supported; only gpt2 (byte-level BPE) and llama (SentencePiece) are"
        )
    if not vocabulary.tokens:
        raise ConfigError("tokenizer.ggml.tokens: the GGUF file lacks it; convert the model again")
    backend = (_byte_level if kind == "gpt2" else _sentence_piece)(metadata, vocabulary)
    with one_line_errors("tokenizer.ggml.tokens"):
        _add_marked_tokens(backend, vocabulary)
        _add_ends(backend, metadata, vocabulary)
    check_encodes(backend, "tokenizer.ggml.tokens")
    return backend


def spelled(metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> dict[int, bytes]:
    """Return by id the bytes of tokens that are spelled literally or have no text, as in llama.cpp.

    There are none if the file embeds a tokenizer.json.
    """
    if metadata.get(_EMBEDDED):
        return {}
    bytes_of = {}
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in _LITERAL:
            bytes_of[number] = token.encode(errors="replace")
        elif kind in _SILENT:
            bytes_of[number] = b""
    return bytes_of


def named_special_tokens(vocabulary: GGUFVocabulary) -> dict[str, str]:
    """Return the special tokens that templates use by name, such as `bos_token`."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {name: vocabulary.text_of(key) for name, key in names.items()}
    return {name: text for name, text in texts.items() if text is not None}


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the unnamed one is the default.

    Raises:
        ConfigError: if one is not a string.
    """
    keys = {name: f"tokenizer.chat_template.{name}" for name in ("tool_use", "rag")}
    keys["default"] = "tokenizer.chat_template"
    for key in keys.values():
        if not isinstance(metadata.get(key, ""), str):
            raise ConfigError(f"{key}: is damaged, a text is expected; convert the model again")
    return {name: metadata[key] for name, key in keys.items() if metadata.get(key)}


def _bpe(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    with one_line_errors("tokenizer.ggml.merges"):
        return tokenizers.Tokenizer(models.BPE(numbers, merges, **options))


def _byte_level(metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre") or "default"
    pre_tokenizer = PRE_TOKENIZERS.get(str(pre))
    if pre_tokenizer is None:
        raise ConfigError(f"tokenizer.ggml.pre {pre!r}: not supported; serve the model from its Hugging Face folder")
    if not metadata.get("tokenizer.ggml.pre"):
        log.warning("tokenizer.ggml.pre is missing: texts are split as by llama.cpp's default; convert the model again")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values(metadata, "merges", str))]
    backend = _bpe(vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges)
    backend.pre_tokenizer = pre_tokenizer.make()
    if pre_tokenizer.normalizer is not None:
        backend.normalizer = pre_tokenizer.normalizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> tokenizers.Tokenizer:
    """Build SentencePiece BPE: merges follow from scores, with byte fallback."""
    tokens, scores = vocabulary.tokens, values(metadata, "scores", float)
    check_length("scores", scores, tokens)
    known = frozenset(tokens)
    best_first = sorted(range(len(tokens)), key=lambda number: -scores[number])
    merges = [  # all merges of two tokens into a third
        (token[:cut], token[cut:])
        for token in (tokens[number] for number in best_first)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    unknown = vocabulary.text_of("unknown")
    backend = _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    strip: list[decoders.Decoder] = []
    if flag(metadata, "add_space_prefix", lambda: True):
        spaces.insert(0, normalizers.Prepend("\u2581"))
        strip = [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_marked_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Add control, unknown and user-defined tokens, which are never split. Only the first two are special."""
    stripping = _PHI3_STRIPPING if _PHI3 in vocabulary.tokens else frozenset()
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in _LITERAL:
            is_special = kind != TokenType.USER_DEFINED
            added = AddedToken(token, normalized=False, special=is_special, rstrip=token in stripping)
            (special if is_special else plain).append(added)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_ends(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], vocabulary: GGUFVocabulary) -> None:
    """Add BOS and EOS around prompts if the metadata requires them.

    Raises:
        ConfigError: if the metadata does not name such a token.
    """
    pre_tokenizer = PRE_TOKENIZERS.get(str(metadata.get("tokenizer.ggml.pre", "")))
    is_sentence_piece = metadata["tokenizer.ggml.model"] == "llama"
    begins = flag(
        metadata, "add_bos_token", lambda: is_sentence_piece or (pre_tokenizer is not None and pre_tokenizer.adds_bos)
    )
    ends = flag(metadata, "add_eos_token", lambda: False)
    if flag(metadata, "add_sep_token", lambda: False):
        log.warning("tokenizer.ggml.add_sep_token is true: ignored, only vocabularies of encoders have separators")
    around = [name for name, added in (("bos", begins), ("eos", ends)) if added]
    for name in around:
        if name not in vocabulary.ids:
            raise ConfigError(
                f"tokenizer.ggml.{name}_token_id: names no token, but prompts get one, because "
                f"tokenizer.ggml.add_{name}_token is true or missing; convert the model again"
            )
    if around:
        tokens = {name: vocabulary.tokens[vocabulary.ids[name]] for name in around}
        backend.post_processor = processors.TemplateProcessing(
            single=[*([tokens["bos"]] if begins else []), "$A", *([tokens["eos"]] if ends else [])],
            special_tokens=[(token, vocabulary.tokens.index(token)) for token in dict.fromkeys(tokens.values())],
        )
