"""Tokens of GGUF files: their types, what ends a generation, and damaged files. The reference is llama.cpp's loader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from fastgen.settings import ConfigError
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tokenizer_formats.gguf_vocabulary import GGUFVocabulary, TokenType
from fastgen.text.vocabulary import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
LETTERS = sorted(byte_alphabet().values())
MISSING = 4294967295  # -1 as converters write it


def byte_level(*tokens: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Return the metadata of single bytes and these tokens with their types."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*LETTERS, *(token for token, _ in tokens)],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [kind for _, kind in tokens],
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def sentence_piece(*tokens: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Return the metadata of <unk>, <s>, </s>, bytes, some letters and these tokens with their types."""
    letters = [(letter, NORMAL) for letter in "▁abchi"]
    found = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    found += [*((f"<0x{byte:02X}>", BYTE) for byte in range(256)), *letters, *tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in found],
        "tokenizer.ggml.token_type": [kind for _, kind in found],
        "tokenizer.ggml.scores": [0.0] * len(found),
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def ends(tokens: Sequence[tuple[str, int]], **keys: Any) -> set[str]:
    """Return the texts of the tokens that end generations of a byte-level model."""
    metadata = byte_level(*tokens, **keys)
    return {metadata["tokenizer.ggml.tokens"][number] for number in GGUFVocabulary.of(metadata).end_tokens}


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER])
@pytest.mark.parametrize(
    "text",
    [
        *("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<|im_end|>", "<end_of_turn>", "<|end|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|fim_pad|>", "<PAD>", "[PAD]", "<|repo_name|>", "<reponame>", "<|fim_repo|>", "<|file_sep|>"),
    ],
)
def test_a_token_ends_generations_by_its_text(text: str, kind: int) -> None:
    metadata = byte_level((text, kind), ("<|other|>", CONTROL), ("word", NORMAL))
    assert GGUFVocabulary.of(metadata).end_tokens == {256}
    assert 256 in Tokenizer.load(metadata).special_token_ids  # llama.cpp makes it a control token


def test_tokens_end_generations_by_their_keys() -> None:
    tokens = [(f"<{number}>", CONTROL) for number in range(5)]
    keys = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258, "fim_pad_token_id": 259}
    assert ends(tokens, **keys) == {"<0>", "<1>", "<2>", "<3>"}
    # A key replaces the search by text for infilling tokens, and only for them.
    assert ends([*tokens, ("<|fim_pad|>", CONTROL), ("<|eot_id|>", CONTROL)], **keys) == {
        *("<0>", "<1>", "<2>", "<3>", "<|eot_id|>")
    }


def test_the_end_of_a_message_does_not_end_an_answer_of_several() -> None:
    harmony = [(f"<|{name}|>", CONTROL) for name in ("start", "channel", "message", "constrain", "end")]
    assert ends(harmony) == {"<|end|>"}
    metadata = byte_level(*harmony, ("<|return|>", CONTROL), ("<|call|>", CONTROL), eos_token_id=261)
    vocabulary = GGUFVocabulary.of(metadata)
    assert vocabulary.end_tokens == {261, 262}
    shown = Tokenizer.load(metadata)
    text = "<|start|>a<|channel|>b<|message|>c<|constrain|>d<|end|>"
    assert shown.decode(shown.encode(text + "<|return|>", add_special_tokens=False)) == text
    assert ends([*harmony, ("<|calls|>", CONTROL), ("<|flush|>", CONTROL)]) == {"<|calls|>", "<|flush|>"}
    assert ends([*harmony, ("<|return|>", CONTROL)]) == {"<|end|>", "<|return|>"}


def test_gemma_4s_tag_does_not_end_an_answer() -> None:
    assert ends([("</s>", NORMAL), ("<|tool_response>", CONTROL)]) == {"<|tool_response>"}


@pytest.mark.parametrize("number", [MISSING, 10**6, 262])
def test_ids_that_are_no_tokens_are_ignored(number: int) -> None:
    keys = {f"{name}_token_id": number for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    tokenizer = Tokenizer.load(byte_level(("<|im_end|>", CONTROL), **keys, add_bos_token=False))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert ends([("<|im_end|>", CONTROL)], **keys) == {"<|im_end|>"}
    # SentencePiece files have llama.cpp's defaults then.
    pieces = Tokenizer.load(sentence_piece(**dict.fromkeys(keys, 10**6)))
    assert (pieces.bos_token_id, pieces.eos_token_id) == (1, 2)
    assert pieces.encode("a", add_special_tokens=True)[0] == 1


@pytest.mark.parametrize("metadata", [byte_level, sentence_piece])
def test_token_types_decide_what_is_shown_and_recognized(metadata: Any) -> None:
    kinds = (NORMAL, UNKNOWN, CONTROL, USER, UNUSED, TokenType.UNDEFINED)
    described = metadata(*((f"<|{kind:d}|>", kind) for kind in kinds), add_bos_token=False)
    tokenizer = Tokenizer.load(described)
    first = len(described["tokenizer.ggml.tokens"]) - len(kinds)
    ids = list(range(first, first + len(kinds)))
    assert [tokenizer.decode([number]) for number in ids] == ["<|1|>", "", "", "<|4|>", "", ""]
    shown = [tokenizer.decode([number], skip_special_tokens=False) for number in ids]
    assert shown == ["<|1|>", "<|2|>", "<|3|>", "<|4|>", "", ""]
    assert {number for number in tokenizer.special_token_ids if number >= first} == {ids[1], ids[2]}
    for kind, number in zip(kinds, ids, strict=True):
        found = number in tokenizer.encode(f"a<|{kind:d}|>a", add_special_tokens=False)
        assert found == (kind in (UNKNOWN, CONTROL, USER)), kind


def test_the_unknown_token_is_hidden() -> None:
    tokenizer, a = Tokenizer.load(sentence_piece()), 260
    assert tokenizer.decode([a, 0, a]) == "aa"
    assert tokenizer.decode([a, 0, a], skip_special_tokens=False) == "a<unk>a"


def test_user_defined_tokens_are_literal() -> None:
    assert Tokenizer.load(byte_level(("é▁", USER))).decode([256]) == "é▁"
    pieces, a, underlined, spaces = Tokenizer.load(sentence_piece(("▁▁", USER), ("  ", USER))), 260, 265, 266
    assert pieces.decode([a, underlined, spaces, a]) == "a▁▁  a"
    assert spaces in pieces.encode("a  a", add_special_tokens=False)


@pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_bos_and_eos_are_added_as_the_file_says(bos: bool, eos: bool) -> None:
    keys = {"add_bos_token": bos, "add_eos_token": eos, "bos_token_id": 256, "eos_token_id": 257}
    tokenizer = Tokenizer.load(byte_level(("<b>", CONTROL), ("<e>", CONTROL), **keys))
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a", add_special_tokens=True) == [256] * bos + plain + [257] * eos
    same = Tokenizer.load(byte_level(("<b>", CONTROL), **keys | {"eos_token_id": 256}))
    assert same.encode("a", add_special_tokens=True) == [256] * bos + plain + [256] * eos


def test_the_prefix_space_follows_the_file() -> None:
    for adds in (True, False):
        tokenizer = Tokenizer.load(sentence_piece(add_space_prefix=adds, add_bos_token=False))
        tokens = tokenizer.encode("hi", add_special_tokens=False)
        assert len(tokens) == 2 + adds
        assert tokenizer.decode(tokens) == "hi"


def test_empty_tokens_get_a_name() -> None:
    assert GGUFVocabulary.of(byte_level(("", NORMAL), ("", UNUSED))).tokens[256:] == ["[EMPTY_256]", "[EMPTY_257]"]


DAMAGED: list[tuple[dict[str, Any], str]] = [
    *((byte_level(**{name: value}), name) for name in ("tokens", "token_type", "merges") for value in (5, "a", [None])),
    *((sentence_piece(**{name: value}), name) for name in ("scores", "token_type") for value in (5, [], ["a"], [0])),
    (byte_level(("a", NORMAL)), "'a' twice"),
    (byte_level(token_type=[NORMAL] * 255), "255 values for 256 tokens"),
    (byte_level(merges=["a zz"]), "merges"),
    (byte_level(merges=["nospace"]), "merges"),
    (byte_level(merges=["a b"]), "merges"),  # ab is no token
    (byte_level(tokens=[]), "tokens"),
    (byte_level(model=None), "model None"),
    (byte_level(model="bert"), "'bert'"),
    (byte_level(pre=["gpt-2"]), "pre"),
    (byte_level(add_bos_token=True), "bos_token_id"),
    (byte_level(add_eos_token=True, eos_token_id=MISSING), "eos_token_id"),
    (byte_level(add_bos_token="yes"), "add_bos_token"),
    (sentence_piece(add_space_prefix=1), "add_space_prefix"),
    (byte_level(eos_token_id="</s>"), "eos_token_id"),
    (byte_level(eos_token_id=1.5), "eos_token_id"),
    (byte_level() | {"tokenizer.chat_template": 5}, "chat_template"),
    (byte_level() | {"tokenizer.chat_template": "{% if %}"}, "chat template"),
    (byte_level() | {"tokenizer.huggingface.json": 5}, "huggingface.json"),
    (byte_level() | {"tokenizer.huggingface.json": "{}"}, "huggingface.json"),
    *((byte_level(**{name: None}), name) for name in ("tokens", "merges")),
    (sentence_piece(scores=None), "scores"),
]


@pytest.mark.parametrize(("metadata", "named"), DAMAGED, ids=[f"{n} {i}" for i, (_, n) in enumerate(DAMAGED)])
def test_damaged_metadata_is_rejected_in_one_line(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as rejection:
        Tokenizer.load(metadata)
    assert named in str(rejection.value)
    assert "\n" not in str(rejection.value)


def test_any_damage_gives_a_tokenizer_or_one_line() -> None:
    source = random.Random(7)
    values = [
        None,
        -1,
        0,
        5,
        2**32 - 1,
        2**63,
        1.5,
        float("nan"),
        True,
        "",
        "a",
        "\udcff",
        [],
        [None],
        [""],
        ["a"] * 300,
    ]
    values += [[0] * 300, [7] * 300, [-(2**70)] * 300, [float("nan")] * 300, {}, [["a"]], b"a"]
    rejections = []
    for _ in range(600):
        metadata = source.choice([byte_level, sentence_piece])(("<|im_end|>", CONTROL), add_bos_token=False)
        names = [*metadata, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template"]
        names += ["tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eot_token_id"]
        for key in source.sample(names, source.choice([1, 1, 1, 2, 3])):
            metadata[key] = source.choice(values)
        try:
            tokenizer = Tokenizer.load(metadata)
        except ConfigError as error:
            rejections.append(str(error))
        else:
            tokenizer.decode(tokenizer.encode("hi <|im_end|>", add_special_tokens=True))
    assert 100 < len(rejections) < 590
    assert not [rejection for rejection in rejections if "\n" in rejection]
