"""The files of Hugging Face folders: equal to AutoTokenizer, or rejected in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from fastgen.settings import ConfigError
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tokenizer_formats.huggingface import end_token_id

CORPUS = ["the quick brown fox jumps over the lazy dog", " 12 34 don't we're", "Hello, world! x<y>\n\nnew é ﬁ"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "",
    "Hello, world!",
    " lead",
    "  two  ",
    "a <new> b",
    "a<new>b<tool>c",
    "x <plain>  y\n<plain>",
    "the fox foxes fox, <plain>x",
    "New Word new word",
    "<a><b> <pad> z",
    "<s>hi</s> fox <unk> <|endoftext|>x",
    "日本語 zzz é",
]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    return backend


def sentence_piece(*, prepends: bool = False) -> Backend:
    """Byte fallback; the space before a text comes from the pre-tokenizer, or from the normalizer as in Llama 2."""
    learner = Backend(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, limit_alphabet=60, show_progress=False)
    learner.train_from_iterator(CORPUS, trainer)
    described = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in described["merges"]]
    backend = Backend(
        models.BPE(described["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # type: ignore[arg-type]
    )
    if prepends:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = learner.pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[arg-type]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<s>", "</s>", "<unk>"]
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    return backend


def changed(make: Callable[[], Backend], **parts: Any) -> Backend:
    backend = make()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def pieces(*steps: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), *steps])  # type: ignore[list-item]


SPACES = decoders.Replace("▁", " ")
LOWER = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
# Vocabularies with parts that other models have.
OTHER_KINDS: dict[str, Callable[[], Backend]] = {
    "Gemma": lambda: changed(
        sentence_piece,
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=pieces(SPACES, decoders.Fuse()),
    ),
    "GPT-NeoX": lambda: changed(byte_level, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": lambda: changed(byte_level, pre_tokenizer=DIGITS, normalizer=normalizers.NFC()),
    "normalized": lambda: changed(byte_level, normalizer=LOWER),
    "a decoder in a list": lambda: changed(byte_level, decoder=decoders.Sequence([decoders.ByteLevel()])),
}


@pytest.mark.parametrize("name", ["no files", "added tokens", *("lstrip", "rstrip", "single_word", "normalized")])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_folder_with_other_parts_equals_auto_tokenizer(kind: str, name: str, tmp_path: Path) -> None:
    backend = OTHER_KINDS[kind]()
    backend.add_tokens([AddedToken("<plain>", normalized=False)])
    write(tmp_path, backend.to_str(), FILES[name], "PreTrainedTokenizerFast")
    assert_equal(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        pieces(decoders.Replace("_", " "), decoders.Fuse()),
        pieces(decoders.Replace("▁", "~"), decoders.Fuse()),
        pieces(SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)),
        pieces(SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 1)),
        pieces(SPACES, decoders.Strip(" ", 1, 0)),
        pieces(SPACES, decoders.WordPiece()),
        decoders.Metaspace(replacement="_"),
    ],
)
def test_a_step_of_a_decoder_that_would_change_the_text_otherwise_is_rejected(decoder: Any, tmp_path: Path) -> None:
    write(tmp_path, changed(sentence_piece, decoder=decoder).to_str(), {}, "PreTrainedTokenizerFast")
    with pytest.raises(ConfigError, match=r"the step \{.* of its decoder is not supported"):
        Tokenizer.load(tmp_path)


KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": byte_level,
    "SentencePiece": sentence_piece,
    "Llama 2": lambda: sentence_piece(prepends=True),
    "Unigram": unigram,
}


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, str]:
    """The tokenizer.json of each kind, with one more token that is not special."""
    found = {}
    for kind, make in KINDS.items():
        backend = make()
        backend.add_tokens([AddedToken("<plain>", normalized=False)])
        found[kind] = backend.to_str()
    return found


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


def decoder(*tokens: tuple[int, dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Return files with tokens by the distance of their ids from the end of the vocabulary."""
    return {CONFIG: {"added_tokens_decoder": dict(tokens), **settings}}


NEW, TOOL = token("<new>", special=True), token("<tool>")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Files of a folder besides tokenizer.json. Ids count from the end of the vocabulary, where -1 is <plain>.
FILES: dict[str, dict[str, Any]] = {
    "no files": {},
    "added tokens": decoder((0, NEW), (1, TOOL)),
    "added tokens out of order": decoder((1, token("<b>")), (0, token("<a>"))),
    "added tokens with other ids": decoder((5, NEW), (9, TOOL)),
    "an id of the vocabulary": decoder((-40, NEW)),
    "words as added tokens": decoder((0, token("New Word", normalized=True)), (1, token("fox", single_word=True))),
    "special now": decoder((-1, token("<plain>", special=True))),
    **{
        flag: decoder(
            (-1, token("<plain>", **{flag: True})), (0, NEW | {flag: True}), (1, token("fox", **{flag: True}))
        )
        for flag in FLAGS
    },
    "older added tokens": {ADDED: {"<new>": 0, "<tool>": 1}},
    "older added tokens, listed": {ADDED: {"<new>": 0, "<tool>": 1}, CONFIG: {"additional_special_tokens": ["<new>"]}},
    "older added tokens, mapped": {
        ADDED: {"<new>": 0, "<tool>": 1},
        MAP: {"additional_special_tokens": ["<new>"], "eos_token": "<tool>"},
    },
    "older added tokens that do not count": {ADDED: {"<new>": 0}, **decoder()},
    "a map that does not count": {MAP: {"eos_token": "<plain>", "additional_special_tokens": ["<tool>"]}, **decoder()},
    "a map that wins": {MAP: {"eos_token": "<plain>"}, CONFIG: {"eos_token": "<new>"}},
    "a map of objects": {MAP: {"eos_token": token("<plain>", rstrip=True), "pad_token": token("<pad>", lstrip=True)}},
    **{
        f"{name}{how}": {file: {name: tokens}}
        for name in ("additional_special_tokens", "extra_special_tokens")
        for how, file, tokens in [
            ("", CONFIG, ["<new>", "<tool>"]),
            (" in the vocabulary", CONFIG, ["<plain>", "<new>"]),
            (" as objects", CONFIG, [{"__type": "AddedToken", **NEW, "rstrip": True}]),
            (" in the map", MAP, ["<new>", "<tool>"]),
        ]
    },
    "named extra tokens": {CONFIG: {"extra_special_tokens": {"image_token": "<new>", "other": "<tool>"}}},
    "a token with a name": {CONFIG: {"image_token": "<new>"}},
    "a new end token": {CONFIG: {"eos_token": "<new>"}},
    "an end token that was not special": {CONFIG: {"eos_token": "<plain>"}},
    "an end token as an object": {CONFIG: {"eos_token": {"__type": "AddedToken", **token("<plain>", rstrip=True)}}},
    "a word as end token": {CONFIG: {"eos_token": "fox"}},
    "an added end token": decoder((0, token("<new>", rstrip=True)), eos_token="<new>"),
    "an unknown token": {CONFIG: {"unk_token": "<unk>"}},
    "null tokens": {CONFIG: {"eos_token": None, "pad_token": None, "additional_special_tokens": None}},
    # tokenizer.json says what is added around a text.
    "ends that do not count": {
        CONFIG: {"add_bos_token": True, "add_eos_token": True, "bos_token": "<plain>", "eos_token": "<plain>"}
    },
    "special tokens as text": {CONFIG: {"split_special_tokens": True}},
    "a prefix space that does not count": {CONFIG: {"add_prefix_space": True}},
}


def write(folder: Path, vocabulary: str, files: Mapping[str, Any], tokenizer_class: str) -> None:
    size = Backend.from_str(vocabulary).get_vocab_size()
    files = {CONFIG: {}, **json.loads(json.dumps(files))}
    files[CONFIG]["tokenizer_class"] = tokenizer_class
    if "added_tokens_decoder" in files[CONFIG]:
        declared = files[CONFIG]["added_tokens_decoder"]
        files[CONFIG]["added_tokens_decoder"] = {str(size + int(place)): token for place, token in declared.items()}
    if ADDED in files:
        files[ADDED] = {content: size + place for content, place in files[ADDED].items()}
    (folder / "tokenizer.json").write_text(vocabulary)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def assert_equal(folder: Path) -> None:
    """Compare ids, texts and special tokens with those of AutoTokenizer."""
    reference, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        for adds in (True, False):
            expected = reference.encode(text, add_special_tokens=adds)
            assert ours.encode(text, add_special_tokens=adds) == expected, text
        for skips in (True, False):
            assert ours.decode(expected, skip_special_tokens=skips) == reference.decode(
                expected, skip_special_tokens=skips
            )
    assert (ours.bos_token_id, ours.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)
    assert end_token_id(folder) == reference.eos_token_id
    special = {number for number, token in reference.added_tokens_decoder.items() if token.special}
    assert ours.special_token_ids == special


# Where a space comes before a normalized token, tokenizers shows special tokens that it should skip.
CASES = [(kind, name) for kind in KINDS for name in FILES if (kind, name) != ("Llama 2", "normalized")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_folder_equals_auto_tokenizer(vocabularies: dict[str, str], kind: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, vocabularies[kind], FILES[name], "PreTrainedTokenizerFast")
    assert_equal(tmp_path)


@pytest.mark.parametrize(
    ("kind", "tokenizer_class", "adds"),
    [
        ("byte-level", "GPT2Tokenizer", True),
        ("byte-level", "GPT2Tokenizer", False),
        ("SentencePiece", "LlamaTokenizerFast", True),
        ("SentencePiece", "LlamaTokenizerFast", False),
        ("Llama 2", "LlamaTokenizer", False),
    ],
)
def test_the_prefix_space_is_a_setting_of_some_classes(
    vocabularies: dict[str, str], kind: str, tokenizer_class: str, adds: bool, tmp_path: Path
) -> None:
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if kind == "byte-level":
        marks = dict.fromkeys(marks, "<|endoftext|>")
    write(tmp_path, vocabularies[kind], {CONFIG: {"add_prefix_space": adds, **marks}}, tokenizer_class)
    assert_equal(tmp_path)


@pytest.mark.parametrize("embedded", [280, 400])
def test_a_vocabulary_may_differ_from_the_embedding_in_size(vocabularies: dict[str, str], embedded: int) -> None:
    tokenizer = Backend.from_str(vocabularies["byte-level"])
    vocabulary = Tokenizer.load({"tokenizer.huggingface.json": vocabularies["byte-level"]}).vocabulary
    pieces = [vocabulary.token_bytes(number) for number in range(embedded)]
    assert [piece for piece in pieces if piece] == pieces[: min(embedded, tokenizer.get_vocab_size())]


def test_holes_and_empty_tokens_have_no_text(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 7, "": 3}
    described = json.loads(Backend(models.BPE(vocabulary, [])).to_str())
    described["decoder"] = json.loads(decoders.ByteLevel().__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    ours = Tokenizer.load(tmp_path)
    assert ours.decode([0, 1, 3, 7, 99]) == "ab"
    assert AutoTokenizer.from_pretrained(tmp_path).decode([0, 3, 7]) == "ab"


MODEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
VALID = json.dumps({"model": MODEL, "decoder": {"type": "ByteFallback"}})
WORDS = json.dumps({"model": MODEL, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}})
NO_UNKNOWN = json.dumps({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}})
ENDS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
PANICS = json.dumps({"model": MODEL, "post_processor": ENDS | {"special_tokens": {}}})


def charsmap(content: str) -> str:
    """Return a tokenizer.json with a normalizer of this content."""
    return json.dumps({"model": MODEL, "normalizer": {"type": "Precompiled", "precompiled_charsmap": content}})


# Damaged files, and what the error names.
DAMAGED: list[tuple[str, str, str]] = [
    *(
        (file, text, file)
        for file in (CONFIG, MAP, ADDED)
        for text in ("", "{", "[]", "null", '"text"', "12", "[" * 100_000, "\ud800")
    ),
    (CONFIG, '{"eos_token": 5}', "eos_token"),
    (CONFIG, '{"eos_token": ["</s>"]}', "eos_token"),
    (CONFIG, '{"eos_token": {"content": 5}}', "eos_token"),
    (CONFIG, '{"eos_token": {"content": "a", "rstrip": "no"}}', "rstrip"),
    (CONFIG, '{"additional_special_tokens": "<a>"}', "additional_special_tokens"),
    (CONFIG, '{"additional_special_tokens": [null]}', "additional_special_tokens"),
    (CONFIG, '{"extra_special_tokens": {"a": 1}}', "a must be"),
    (CONFIG, '{"added_tokens_decoder": []}', "added_tokens_decoder is a list"),
    (CONFIG, '{"added_tokens_decoder": {"x": {"content": "a"}}}', "token ids as keys"),
    (CONFIG, '{"added_tokens_decoder": {"5": "a", "-1": "b"}}', "token ids as keys"),
    (CONFIG, '{"added_tokens_decoder": {"5": null}}', "added_tokens_decoder 5"),
    (CONFIG, '{"eos_token": "<e>", "added_tokens_decoder": {"9": {"content": "<e>"}}}', "eos_token"),
    (CONFIG, '{"chat_template": 5}', "chat_template is a number"),
    (CONFIG, '{"chat_template": [{"name": "default"}]}', "name and template"),
    (CONFIG, '{"chat_template": ["x"]}', "name and template"),
    (CONFIG, '{"chat_template": "{% for %}"}', "chat template"),
    ("chat_template.jinja", "\udcff", "chat_template.jinja"),
    (ADDED, '{"<a>": "5"}', "'<a>'"),
    (ADDED, '{"<a>": -1}', "'<a>'"),
    *(
        ("tokenizer.json", text, "tokenizer.json")
        for text in ("", "{}", "[]", "null", '{"model": {}}', VALID.replace('"a"', "5"), VALID.replace("0", "-1"))
    ),
    ("tokenizer.json", VALID.replace("[]", '[["a", "b"]]'), "tokenizer.json"),
    ("tokenizer.json", WORDS, "WordPiece"),
    ("tokenizer.json", VALID.replace('"merges"', '"continuing_subword_prefix": "a", "merges"'), "subword_prefix"),
    ("tokenizer.json", VALID.replace("[]", '[["a\\nb", "c"]]'), "tokenizer.json"),  # the name of the token in one line
    ("tokenizer.json", NO_UNKNOWN, "unk_id"),  # shows when a text is encoded
    ("tokenizer.json", PANICS, "tokenizer.json"),
    (CONFIG, '{"eos_token": "\\ud800"}', CONFIG),
    (ADDED, '{"\\ud800": 5}', "surrogates"),
    # The first four bytes are a size of 8 GiB, which the library would allocate.
    *(("tokenizer.json", charsmap(text), "precompiled_charsmap") for text in ("AAAA", "//////////8=", "/////w==")),
    ("tokenizer.json", charsmap("not base64!"), "tokenizer.json"),
    *(
        ("tokenizer.json", json.dumps({"model": MODEL | changes}), "tokenizer.json")
        for changes in (
            {"vocab": {"a": 2**40}},
            {"vocab": {"a": 1.5}},
            {"vocab": {"a": 0, "b": 1, "c": 1}},
            {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
            {"vocab": {"a": 0, "b": 1}, "merges": ["a b c"]},
            {"dropout": 2.0},
        )
    ),
]


@pytest.mark.parametrize(("file", "text", "named"), DAMAGED)
def test_a_damaged_file_is_rejected_in_one_line(file: str, text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(VALID)
    (tmp_path / file).write_bytes(text.encode(errors="surrogateescape" if "\udcff" in text else "surrogatepass"))
    with pytest.raises(ConfigError) as rejection:
        Tokenizer.load(tmp_path)
    assert named in str(rejection.value)
    assert "\n" not in str(rejection.value)


def test_two_tokens_of_one_id_are_named_each_time(tmp_path: Path) -> None:
    """The library decodes the id to either of them, by chance."""
    model = {**MODEL, "vocab": {"a": 0, **{f"t{number}": number for number in range(1, 9)}, "again": 5}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": {"type": "ByteFallback"}}))
    for _ in range(20):
        with pytest.raises(ConfigError, match="vocabulary gives the id 5 to 'again' and 't5'"):
            Tokenizer.load(tmp_path)
