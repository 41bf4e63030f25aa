"""Pre-tokenizers of byte-level vocabularies, by the name in `tokenizer.ggml.pre`.

The names are those of llama.cpp's loader (src/llama-vocab.cpp, read at commit 00ad355e). An expression is that of the
models' tokenizer.json where llama.cpp quotes it, and otherwise llama.cpp's. Not supported are the names of vocabularies
that are not byte-level (gemma4, whitespace, …), of encoders with a separator (roberta-bpe, …), and kimi-k2, afmoe,
superbpe, chameleon and deepseek-llm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
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
_SPARK = (*_DEEPSEEK_V3[:2], _DEEPSEEK_V3[2].replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{D7FF}]+", r"\p{N}")
_BAILING = _QWEN2.replace(_CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)").replace(r"\s*[\r\n]+", r"\s*[\r\n]")
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_JAIS2 = (
    _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


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
    """Return a function that creates a sequence of splits; each applies to the pieces of the previous one."""

    def make() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _like_gpt2()])


def _named(names: str, tokenizer: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), tokenizer)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named("default", PreTokenizer(_by(*_DEFAULT))),
    **_named("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum", PreTokenizer(_like_gpt2)),
    **_named("modern-bert mpt olmo jais trillion granite-docling exaone4", PreTokenizer(_like_gpt2)),
    **_named(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer(_digits_then_like_gpt2)
    ),
    **_named(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer(_by(_LLAMA3), ignore_merges=True, adds_bos=True),
    ),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer(_by(_LLAMA3))),  # dbrx is also Phi-4's
    **_named("minicpm5", PreTokenizer(_by(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    **_named("jais-2", PreTokenizer(_by(_JAIS2))),
    **_named("qwen2", PreTokenizer(_by(_QWEN2), normalizer=normalizers.NFC)),
    **_named("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer(_by(_QWEN2))),
    **_named("qwen35", PreTokenizer(_by(_QWEN35), normalizer=normalizers.NFC)),
    **_named("ufakzeka", PreTokenizer(_by(_QWEN2.removeprefix(f"{_CONTRACTIONS}|")))),
    **_named("laguna", PreTokenizer(_by(r"[^\n]+|[\n]+", _QWEN2))),
    **_named("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_by(_BAILING))),
    **_named("seed-coder", PreTokenizer(_by(_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")))),
    **_named("exaone-moe", PreTokenizer(_by(_EXAONE_MOE))),
    **_named("tekken", PreTokenizer(_by(_TEKKEN), ignore_merges=True, adds_bos=True)),  # Mistral's since Nemo
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(_by(_GPT4O))),  # also Phi-4-mini's
    **_named("granite-embed-multi-97m", PreTokenizer(_by(_GPT4O), ignore_merges=True)),
    **_named("tiny_aya cohere2moe", PreTokenizer(_by(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    **_named("youtu", PreTokenizer(_by(*_YOUTU), ignore_merges=True)),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_by(*_DEEPSEEK_V3))),
    **_named("spark2_5", PreTokenizer(_by(*_SPARK))),
    **_named("deepseek-coder", PreTokenizer(_by(*_DEEPSEEK_CODER))),
    **_named("falcon", PreTokenizer(_by(*_FALCON))),
    **_named("poro-chat bloom gpt3-finnish", PreTokenizer(_by(_BLOOM))),
    **_named("viking", PreTokenizer(_by(_BLOOM, r"\p{N}"))),
}
