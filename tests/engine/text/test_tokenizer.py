"""Our tokenizers against those of transformers, built from the same vocabularies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from fastgen.settings import ConfigError
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tokenizer_formats.pre_tokenizers import PRE_TOKENIZERS

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two leading spaces and trailing  ",
    "a  1 22  333, 4.5e10",
    "don't I'LL we're 'tis",
    "tabs\t\tand\n\n newlines \r\n\r\n  end",
    "def f(x):\n    return x ** 2  # square\n",
    "日本語のテキスト、한국어, العربية, हिन्दी १२३",
    "é e\u0301 ﬁ 😀👩‍👩‍👧🇩🇪 \u00a0\u2003|",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\x00\x7f\u200b",
]

CORPUS = [
    *(text for text in TEXTS if "<|im_end|>" not in text),  # else it would become a word, which ends generations
    "the quick brown fox jumps over the lazy dog",
    "the then there their these those",
    "12 34 56 1234 5678",
] * 8


def train(backend: Backend, **options: Any) -> tuple[list[str], list[str]]:
    """Return tokens and merges, in GGUF spelling, of a small vocabulary trained on the corpus."""
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(show_progress=False, **options))
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def assert_same(ours: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        expected = reference.encode(text)
        assert ours.encode(text, add_special_tokens=True) == expected, text
        for skip in (True, False):
            assert ours.decode(expected, skip_special_tokens=skip) == reference.decode(
                expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_smollm2_equals_transformers_and_splits_digits(smollm2: Tokenizer, smollm2_metadata: Mapping[str, Any]) -> None:
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata["tokenizer.ggml.merges"]]
    reference = GPT2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = [t for t, kind in zip(tokens, smollm2_metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    reference.add_special_tokens({"additional_special_tokens": control})
    assert_same(smollm2, reference)


def test_smollm2_has_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("<|im_start|>", add_special_tokens=False) == [1]
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert {0, 1, 2} <= smollm2.special_token_ids


LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", [LLAMA3_WORDS]),
        ("dbrx", [LLAMA3_WORDS]),
        ("qwen2", [QWEN2_WORDS]),
        ("deepseek-r1-qwen", [QWEN2_WORDS]),
        ("tekken", [TEKKEN_WORDS]),
        ("gpt-4o", [GPT4O_WORDS]),
        ("gpt-2", None),
    ],
)
def test_byte_level_vocabularies_equal_transformers(pre: str, words: list[str] | None) -> None:
    backend = Backend(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    backend.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if words is None
        else pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(each), "isolated") for each in words),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    tokens, merges = train(backend, vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokens = [*tokens, "<|im_start|>", "<|im_end|>", "<think>"]
    reference = GPT2Tokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    reference.backend_tokenizer.pre_tokenizer = backend.pre_tokenizer
    if pre == "qwen2":
        reference.backend_tokenizer.normalizer = normalizers.NFC()
    reference.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    reference.add_tokens([AddedToken("<think>", normalized=False)])
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.add_bos_token": False,
    }
    ours = Tokenizer.load(metadata)
    assert_same(ours, reference)
    assert len(tokens) - 1 in ours.encode("a <think> b", add_special_tokens=False)


def test_a_sentencepiece_vocabulary_equals_transformers() -> None:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    ascii_letters = [chr(i) for i in range(33, 127)]
    learnt, merges = train(backend, vocab_size=400, initial_alphabet=ascii_letters, limit_alphabet=95)
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # In SentencePiece's order: special tokens and bytes, merged tokens by rank, single characters.
    merged = [merge.replace(" ", "") for merge in merges]
    pieces = list(dict.fromkeys(merged)) + [token for token in learnt if len(token) == 1]
    tokens = [*marks, *pieces]
    scores = [0.0] * len(marks) + [-float(rank) for rank in range(len(pieces))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = Tokenizer.load(metadata)
    reference = LlamaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    # SentencePiece puts a space before every text, also one that begins with a space (as Llama 2's published
    # tokenizer.json does); transformers' class only before others.
    reference.backend_tokenizer.pre_tokenizer = None
    reference.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text, add_special_tokens=True) == [1, *expected]
        assert ours.decode(expected) == reference.decode(expected)
        assert ours.decode(expected) == text.replace("<s>", "")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "don'T 12345 x=1\n\n  y", ["don", "'T", " ", "123", "45", " x", "=", "1", "\n\n", " ", " y"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", " don't", " ", "123", "4"]),
        ("tekken", "HelloWorld don't 12", ["Hello", "World", " don", "'t", " ", "1", "2"]),
        ("deepseek-v3", "1234漢字ab $x", ["123", "4", "漢字", "ab", " $", "x"]),
        ("smollm", "ab 12", ["ab", " ", "1", "2"]),
        # The rest as llama.cpp's expressions say.
        ("default", "a+b 1234's", ["a", "+", "b", " ", "123", "4", "'", "s"]),
        ("phi-2", "don't 12345\n\nx", ["don", "'t", " 12345", "\n", "\n", "x"]),
        ("command-r", "ab 12", ["ab", " ", "1", "2"]),
        ("falcon3", "1234I'LL", ["123", "4", "I", "'LL"]),
        ("glm4", "x 1234", ["x", " ", "123", "4"]),
        ("minicpm5", "x 12345", ["x", " ", "123", "45"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, " " * 2, " b"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("stablelm2", "नमस्ते", ["नमस", "्त", "े"]),
        ("ufakzeka", "I'll 'less", ["I", "'ll", " '", "less"]),
        ("laguna", "a.\r\nb", ["a", ".\r", "\n", "b"]),
        ("bailingmoe", "\n\na's", ["\n\n", "a", "'s"]),
        ("seed-coder", "a.\n\nb", ["a", ".", "\n\n", "b"]),
        ("exaone-moe", "He said नमस्ते//", ["He said नमस्ते", "//"]),
        ("llama4", "HelloWorld 1234", ["Hello", "World", " ", "123", "4"]),
        ("tiny_aya", "x 1234567", ["x", " ", "1", "234", "567"]),
        ("youtu", "ab한국어12", ["ab", "한국어", "1", "2"]),
        ("hunyuan-dense", "1234漢字", ["123", "4", "漢字"]),
        ("spark2_5", "12\n\n漢字a", ["1", "2", "\n", "\n", "漢字", "a"]),
        ("deepseek-coder", "ab\n\n 12漢字가, b", ["ab", "\n", "\n", " ", "1", "2", "漢字가", ",", " b"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("bloom", "Hi, there 12.", ["Hi", ",", " there", " 12", "."]),
        ("viking", "Hi, there 12.", ["Hi", ",", " there", " ", "1", "2", "."]),
    ],
)
def test_the_pre_tokenizer_follows_from_its_name(pre: str, text: str, pieces: list[str]) -> None:
    spans = [span for _, span in PRE_TOKENIZERS[pre].make().pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


# Names in llama.cpp's loader, commit 00ad355e. Those below are not byte-level, or not split by plain expressions.
LLAMA_CPP_NAMES = """
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-coder
    deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0
    mellum modern-bert jais-2 refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe
    poro-chat glm4 chatglm-bpe viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe
    minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe trillion granite-docling
    bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm ufakzeka grok-2 laguna minimax-m2
    solar-open mellum2
"""
REJECTED_NAMES = """
    deepseek-llm gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace chameleon
    superbpe kimi-k2 afmoe of-next-year
"""


def test_every_pre_tokenizer_of_llama_cpp_is_known_or_rejected_by_name(smollm2_metadata: Mapping[str, Any]) -> None:
    assert sorted(PRE_TOKENIZERS) == sorted(LLAMA_CPP_NAMES.split())
    for name in LLAMA_CPP_NAMES.split():
        adds_bos = PRE_TOKENIZERS[name].adds_bos
        assert adds_bos == (PRE_TOKENIZERS[name] in (PRE_TOKENIZERS["llama3"], PRE_TOKENIZERS["tekken"]))
        metadata = {**smollm2_metadata, "tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
        assert Tokenizer.load(metadata).encode("Hi", add_special_tokens=True)
    for name in REJECTED_NAMES.split():
        with pytest.raises(ConfigError, match=f"tokenizer.ggml.pre '{name}': not supported"):
            Tokenizer.load({**smollm2_metadata, "tokenizer.ggml.pre": name})


@pytest.mark.parametrize("given", [{}, {"tokenizer.ggml.pre": ""}])
def test_a_file_without_a_pre_tokenizer_is_read_as_by_llama_cpp_with_a_warning(
    smollm2_metadata: Mapping[str, Any], given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    metadata = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.ggml.pre"}
    tokenizer = Tokenizer.load({**metadata, **given})
    assert "tokenizer.ggml.pre is missing" in caplog.text
    named = Tokenizer.load({**metadata, "tokenizer.ggml.pre": "default"})
    assert tokenizer.encode("a+b 1234's", add_special_tokens=False) == named.encode(
        "a+b 1234's", add_special_tokens=False
    )


def gemma_like_metadata() -> dict[str, Any]:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    ascii_letters = [chr(i) for i in range(33, 127)]
    learnt, merges = train(backend, vocab_size=400, initial_alphabet=ascii_letters, limit_alphabet=95)
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = list(dict.fromkeys(merge.replace(" ", "") for merge in merges))
    pieces += [token for token in learnt if len(token) == 1]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*marks, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(marks) + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        "merges": merges,
    }


def test_a_gemma_vocabulary_equals_transformers_and_keeps_first_spaces() -> None:
    metadata = gemma_like_metadata()
    ours = Tokenizer.load(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    reference = GemmaTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["merges"]],
    )
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text, add_special_tokens=True) == [2, *expected]
        assert ours.decode(expected) == text


def test_phi3s_special_tokens_strip_the_white_space_after_them() -> None:
    metadata = gemma_like_metadata()
    metadata["tokenizer.ggml.tokens"][:2] = ["<|placeholder1|>", "<|end|>"]
    ours = Tokenizer.load(metadata)
    assert ours.encode("a<|end|>\n  b", add_special_tokens=False) == ours.encode("a<|end|>b", add_special_tokens=False)
    kept = "a<start_of_turn>\nb"
    assert ours.decode(ours.encode(kept, add_special_tokens=False), skip_special_tokens=False) == kept


def test_an_embedded_tokenizer_json_is_used(smollm2: Tokenizer) -> None:
    metadata = {
        "tokenizer.ggml.model": "unigram",
        "tokenizer.ggml.tokens": [],
        "tokenizer.huggingface.json": smollm2.backend.to_str(),
    }
    ours = Tokenizer.load(metadata)
    assert ours.encode("Hello 12", add_special_tokens=False) == smollm2.encode("Hello 12", add_special_tokens=False)
    with pytest.raises(ConfigError, match=r"tokenizer\.huggingface\.json: not a valid tokenizer"):
        Tokenizer.load(metadata | {"tokenizer.huggingface.json": "{}"})


def test_a_hugging_face_folder_equals_transformers(smollm2: Tokenizer, tmp_path: Path) -> None:
    saved = PreTrainedTokenizerFast(
        tokenizer_object=smollm2.backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    saved.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    saved.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert_same(ours, PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.chat_template is not None
    assert ours.chat_template.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5'"),
        ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre 'chameleon'"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template: line 1"),
    ],
)
def test_an_unsupported_tokenizer_is_rejected_by_name(
    smollm2_metadata: Mapping[str, Any], change: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")) as refusal:
        Tokenizer.load({**smollm2_metadata, **change})
    assert "\n" not in str(refusal.value)


def test_a_missing_key_is_rejected_by_name(smollm2_metadata: Mapping[str, Any]) -> None:
    without_merges = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.ggml.merges"}
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges: the GGUF file lacks it"):
        Tokenizer.load(without_merges)


def test_a_folder_without_tokenizer_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_an_unsupported_decoder_is_rejected(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its decoder is missing"):
        Tokenizer.load(tmp_path)
