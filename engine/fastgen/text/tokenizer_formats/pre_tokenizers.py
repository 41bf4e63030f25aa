"""Pre-tokenizers of byte-level vocabularies, by the name in `tokenizer.ggml.pre`.

The names are those of llama.cpp's converter (`get_vocab_base_pre`), the other attributes those of its loader
(`llama-vocab.cpp`), and the expressions those of the models' tokenizer.json. Names for which these are not known are
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Splits words by case: upper-case letters, then lower-case ones.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One pre-tokenizer.

    Attributes:
        make: creates the pre-tokenizer.
        ignore_merges: whether a word that is a token is used directly, even if the merges do not produce it.
        adds_bos: whether prompts start with BOS by default.
        normalizer: creates the normalizer; None for no normalization.
    """

    make: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _by(*expressions: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Return a sequence of splits; each applies to the pieces of the previous one."""

    def make() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _like_gpt2()])


_LIKE_LLAMA3 = PreTokenizer(_by(_LLAMA3), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(_like_gpt2),
    "smollm": PreTokenizer(_digits_then_like_gpt2),
    "starcoder": PreTokenizer(_digits_then_like_gpt2),
    "refact": PreTokenizer(_digits_then_like_gpt2),
    "llama-bpe": _LIKE_LLAMA3,
    "llama3": _LIKE_LLAMA3,
    "llama-v3": _LIKE_LLAMA3,
    "dbrx": PreTokenizer(_by(_LLAMA3)),  # also Phi-4's
    "qwen2": PreTokenizer(_by(_QWEN2), normalizer=normalizers.NFC),
    "deepseek-r1-qwen": PreTokenizer(_by(_QWEN2)),
    "tekken": PreTokenizer(_by(_TEKKEN), ignore_merges=True, adds_bos=True),  # Mistral's since Nemo
    "gpt-4o": PreTokenizer(_by(_GPT4O)),  # also Phi-4-mini's
    "deepseek-v3": PreTokenizer(_by(*_DEEPSEEK_V3)),
}
