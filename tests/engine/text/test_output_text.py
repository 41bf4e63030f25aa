"""Incremental output: tokens to text, stop strings, and both together."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.generations import output_text
from fastgen.core.request import FinishReason
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.stop_strings import StopStrings
from fastgen.text.tokenizer import Tokenizer

token_ids = st.lists(st.integers(0, 49151), max_size=60)
cuts = st.randoms(use_true_random=False)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(ids=token_ids)
def test_chunks_add_up_to_the_complete_text(smollm2: Tokenizer, ids: list[int]) -> None:
    whole = smollm2.backend.decode(ids, skip_special_tokens=True)
    assert "".join(stream(smollm2, ids)) == whole == smollm2.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
def test_output_never_ends_inside_a_character(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, add_special_tokens=False)
    pieces = stream(smollm2, ids)
    assert "".join(pieces) == smollm2.decode(ids)
    if smollm2.decode(ids) == text and "\ufffd" not in text:  # its vocabulary lacks some bytes
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_generation_that_ends_inside_a_character_ends_with_u_fffd(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👩", add_special_tokens=False)
    assert len(ids) > 1
    assert stream(smollm2, ids[:-1])[-1] == "\ufffd"


def test_special_tokens_produce_no_text(smollm2: Tokenizer) -> None:
    assert "".join(stream(smollm2, smollm2.encode("a<|im_end|>b", add_special_tokens=False))) == "ab"


def sentence_piece() -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 262 + [-1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
        "tokenizer.ggml.bos_token_id": 1,
    }
    return Tokenizer.load(metadata)


def test_a_sentencepiece_continuation_keeps_its_space() -> None:
    tokenizer = sentence_piece()
    ids = tokenizer.encode("hi hié", add_special_tokens=False)
    assert tokenizer.decode(ids) == "hi hié"
    assert "".join(stream(tokenizer, ids)) == " hi hié"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=40))
def test_sentencepiece_bytes_in_any_order_add_up_to_the_whole_text(ids: list[int]) -> None:
    tokenizer = SENTENCE_PIECE
    pieces = stream(tokenizer, ids)
    spelled = b"".join(tokenizer.vocabulary.token_bytes(i) for i in ids if i not in tokenizer.special_token_ids)
    assert "".join(pieces) == spelled.decode(errors="replace")
    assert "".join(pieces).removeprefix(" ") == tokenizer.decode(ids)


SENTENCE_PIECE = sentence_piece()


@settings(max_examples=200, deadline=None)
@given(ids=token_ids, random=cuts, stops=st.lists(st.sampled_from(["e", " th", "\n", "\ufffd"]), max_size=2))
def test_output_does_not_depend_on_the_number_of_tokens_per_push(
    smollm2: Tokenizer, ids: list[int], random: Random, stops: list[str]
) -> None:
    def text(sizes: Callable[[int], int]) -> tuple[str, int]:
        output, rest, shown = output_text(smollm2, stop=tuple(stops), min_tokens=2), ids, ""
        while output.finish_reason is None:
            size = sizes(len(rest))
            shown += output.push(rest[:size], FinishReason.LENGTH if size == len(rest) else None)
            rest = rest[size:]
        return shown, output.num_tokens

    whole = text(lambda left: left)
    assert text(lambda left: random.randint(min(1, left), left)) == whole
    assert text(lambda left: min(1, left)) == whole


def test_no_stop_string_ends_a_text_before_min_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two one two", add_special_tokens=False)
    assert len(ids) == 4
    output = output_text(smollm2, stop=("two",), min_tokens=3)
    assert [output.push([token], None) for token in ids] == ["one", " two", " one", " "]
    assert (output.finish_reason, output.stop_string) == (FinishReason.STOP, "two")


def test_a_stop_string_can_begin_before_min_tokens_and_end_after_them(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three four", add_special_tokens=False)
    assert len(ids) == 4
    output = output_text(smollm2, stop=("one two three", "two"), min_tokens=3)
    assert "".join(output.push([token], None) for token in ids[:3]) == ""
    assert (output.finish_reason, output.stop_string) == (FinishReason.STOP, "one two three")


def test_one_special_token_can_be_shown_while_others_are_hidden(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<repo_name>a<filename>", add_special_tokens=False)
    output = output_text(smollm2, marks=("<repo_name>",))
    assert output.push(ids, None) == "<repo_name>a"


letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def cut_by_hand(text: str, stops: list[str]) -> str:
    """Reference implementation: add one character at a time and search."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=500, deadline=None)
@given(text=letters, stops=stop_lists, random=cuts)
def test_stop_strings_do_not_depend_on_how_the_text_is_split(text: str, stops: list[str], random: object) -> None:
    expected, watcher, out, rest = cut_by_hand(text, stops), StopStrings(stops), "", text
    while rest:
        size = random.randint(1, len(rest))  # type: ignore[attr-defined]
        piece, rest = rest[:size], rest[size:]
        shown, found = watcher.push(piece)
        out += shown
        if found is not None:
            break
    else:
        out += watcher.finish()
    assert out == expected


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    watcher, shown = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        piece, found = watcher.push(character)
        shown += piece
        if found is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_ends_before_the_stop_string_and_counts_the_token_that_completed_it(smollm2: Tokenizer) -> None:
    output = output_text(smollm2, stop=("three", "zzz"))
    ids = smollm2.encode("one two three four", add_special_tokens=False)
    text = ""
    for token in ids:
        text += output.push([token], None)
        if output.finish_reason is not None:
            break
    assert text == "one two "
    assert output.finish_reason is FinishReason.STOP
    assert output.num_tokens == 3


def test_the_token_that_stopped_the_engine_produces_no_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two", add_special_tokens=False)
    output = output_text(smollm2)
    assert output.push(ids, FinishReason.STOP) == "one"
    assert output.num_tokens == len(ids)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_held_back_text_is_returned_at_the_end(smollm2: Tokenizer, reason: FinishReason) -> None:
    output = output_text(smollm2, stop=(" two!",))
    ids = smollm2.encode("one two", add_special_tokens=False)
    assert output.push(ids, None) == "one"
    assert (output.push([], reason), output.finish_reason) == (" two", reason)
