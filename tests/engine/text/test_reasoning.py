"""Reasoning is separated from the answer, however the text is split, and grammars apply to the answer only."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from tokenizers import AddedToken

from engine.text.matching import byte_tokenizer, matches
from fastgen.core.sampling_params import Grammar
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.registry import reasoning_format
from fastgen.text.reasoning.think import Think
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Vocabulary

FORMAT = Think()
MARKS = (FORMAT.opening, FORMAT.closing)


def with_plain_marks() -> Tokenizer:
    """Return a tokenizer whose marks are tokens, but no special ones, as Qwen3's."""
    backend = byte_tokenizer(None).backend
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return Tokenizer(backend, Vocabulary(backend), None, None, 256)


TOKENIZERS = {"plain": with_plain_marks(), "special": byte_tokenizer(None, *MARKS), "text": byte_tokenizer(None)}


def split(text: str, start: Start, cuts: list[int]) -> tuple[str, str]:
    parser = FORMAT.parser(start)
    edges = [0, *sorted(cuts), len(text)]
    parts = [parser.push(text[left:right]) for left, right in pairwise(edges)]
    parts.append(parser.finish())
    return "".join(thought for thought, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "start", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nYes. ", Start.OPEN, "Let me see.", "Yes. "),
        ("\n<think>a < b\n\n</thing></think>c", Start.OPEN, "a < b\n\n</thing>", "c"),
        ("so</think>Yes <think>no</think>", Start.INSIDE, "so", "Yes <think>no</think>"),
        ("<think>\n\n</think>\n\nYes", Start.OPEN, "", "Yes"),
        ("no end </thi", Start.INSIDE, "no end </thi", ""),
        ("<think>", Start.OPEN, "", ""),
        (" Yes </think>", Start.OPEN, "", " Yes </think>"),
        ("<thin ice>", Start.OPEN, "", "<thin ice>"),
        ("<thi", Start.OPEN, "", "<thi"),
        ("<think>a</think>b", Start.AFTER, "", "<think>a</think>b"),
    ],
)
def test_reasoning_is_separated_however_the_text_is_split(
    text: str, start: Start, reasoning: str, content: str
) -> None:
    source = random.Random(text)
    assert split(text, start, list(range(1, len(text)))) == (reasoning, content)
    for _ in range(20):
        assert split(text, start, source.sample(range(len(text) + 1), 3)) == (reasoning, content)


def test_reasoning_is_emitted_as_it_arrives() -> None:
    parser = FORMAT.parser(Start.INSIDE)
    assert parser.push("\nLet me") == ("Let me", "")
    assert parser.push(" see </") == (" see", "")
    assert parser.push("think> So") == ("", "So")
    assert parser.push(" it is") == ("", " it is")


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", Start.OPEN),
        ("<|im_start|>assistant\n<think>\n", Start.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Start.AFTER),
        ("<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n", Start.OPEN),
    ],
)
def test_the_end_of_the_prompt_tells_where_a_generation_starts(prompt: str, start: Start) -> None:
    assert FORMAT.start_after(prompt) is start


def test_a_continued_message_tells_where_its_generation_starts() -> None:
    assert FORMAT.start_within("<think>so") is Start.INSIDE
    assert FORMAT.start_within("<think>so</think>Yes") is Start.AFTER
    assert FORMAT.start_within("Yes") is Start.AFTER
    assert FORMAT.start_within(" ") is Start.OPEN


ANSWERS = {
    "json": (Grammar(kind="json_schema", text='{"type": "object", "required": ["a"]}'), '{"a": 1}', "[1]"),
    "any json": (Grammar(kind="json_object"), "{}", "no"),
    "regex": (Grammar(kind="regex", text="[0-9]+/[0-9]+"), "1/2", "1"),
    "lark": (Grammar(kind="lark", text='start: "{" A "}"\nA: /a+/'), "{aa}", "aa"),
}


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_structure_applies_after_the_reasoning(kind: str, marks: str) -> None:
    tokenizer, (answer, right, wrong) = TOKENIZERS[marks], ANSWERS[kind]
    inside = FORMAT.grammar(answer, tokenizer, Start.INSIDE, None, offers_tools=False)
    possible = FORMAT.grammar(answer, tokenizer, Start.OPEN, None, offers_tools=False)
    assert inside is not None
    assert possible is not None
    for text, fits in ((right, True), (wrong, False)):
        assert matches(inside, tokenizer, f"\nSo {wrong}, or {right}?\n</think>\n\n{text}") is fits
        assert matches(possible, tokenizer, f"<think>\nSo {wrong}?\n</think>{text}") is fits
        assert matches(possible, tokenizer, text) is fits
    assert not matches(inside, tokenizer, right)
    assert FORMAT.grammar(answer, tokenizer, Start.AFTER, None, offers_tools=False) is answer


@pytest.mark.parametrize("marks", ["plain", "special"])
@pytest.mark.parametrize("answer", [None, ANSWERS["json"][0]], ids=["free", "json"])
def test_a_budget_ends_the_reasoning(marks: str, answer: Grammar | None) -> None:
    tokenizer, text = TOKENIZERS[marks], '{"a": 1}'
    inside = FORMAT.grammar(answer, tokenizer, Start.INSIDE, 4, offers_tools=False)
    possible = FORMAT.grammar(answer, tokenizer, Start.OPEN, 4, offers_tools=False)
    assert inside is not None
    assert possible is not None
    for thought, fits in (("", True), ("one", True), ("four", True), ("fives", False)):
        assert matches(inside, tokenizer, f"{thought}</think>{text}") is fits
        assert matches(possible, tokenizer, f"<think>{thought}</think>\n\n{text}") is fits
    assert matches(possible, tokenizer, text)
    nothing = FORMAT.grammar(answer, tokenizer, Start.INSIDE, 0, offers_tools=False)
    assert nothing is not None
    assert matches(nothing, tokenizer, f"</think>{text}")
    assert not matches(nothing, tokenizer, f"a</think>{text}")


def test_nothing_constrains_a_generation_without_structure_and_budget() -> None:
    assert FORMAT.grammar(None, TOKENIZERS["plain"], Start.INSIDE, None, offers_tools=False) is None


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "start", "reasoning"),
    [
        ("<think>ab</think>c", Start.OPEN, "<think>ab</think>"),
        ("ab</think>c", Start.INSIDE, "ab</think>"),
        ("abc", Start.INSIDE, "abc"),
        ("<thin", Start.OPEN, ""),
        ("abc</think>", Start.OPEN, ""),
        ("ab</think>", Start.AFTER, ""),
    ],
)
def test_reasoning_tokens_are_counted_with_their_marks(text: str, start: Start, reasoning: str, marks: str) -> None:
    tokenizer = TOKENIZERS[marks]
    encoded = [tokenizer.encode(piece, add_special_tokens=False) for piece in (text, reasoning)]
    assert FORMAT.num_tokens(encoded[0], start, tokenizer) == len(encoded[1])


def test_the_format_is_found_by_the_template_or_the_vocabulary() -> None:
    told = byte_tokenizer(ChatTemplate("{{ messages[0].content.split('</think>')[-1] }}", {}))
    assert reasoning_format("auto", told) == FORMAT
    assert reasoning_format("auto", TOKENIZERS["plain"]) == FORMAT
    assert reasoning_format("auto", TOKENIZERS["text"]) is None
    assert reasoning_format("none", told) is None
    assert reasoning_format("think", TOKENIZERS["text"]) == FORMAT


def test_a_schema_that_is_not_an_object_is_kept() -> None:
    answer = Grammar(kind="json_schema", text=json.dumps({"enum": ["a/b", 2]}))
    grammar = FORMAT.grammar(answer, TOKENIZERS["plain"], Start.INSIDE, None, offers_tools=False)
    assert grammar is not None
    assert matches(grammar, TOKENIZERS["plain"], '</think>"a/b"')
    assert not matches(grammar, TOKENIZERS["plain"], "</think>3")
