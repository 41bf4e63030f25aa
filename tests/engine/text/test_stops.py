"""Stop strings: those that name special tokens, and those that appear in the reasoning."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.matching import byte_tokenizer
from fastgen.core.request import FinishReason
from fastgen.text.output import OutputText, TextRules
from fastgen.text.reasoning import ReasoningFormat, Start

SPECIAL = ("<|sp|>", "<|spy|>", "<|other|>")
TOKENIZER = byte_tokenizer(None, *SPECIAL)
ALL = "abc<|sp|>def<|other|>ghi"
THINK = ReasoningFormat()


def output(
    rules: TextRules, text: str, cuts: list[int] | None = None, reason: FinishReason | None = FinishReason.LENGTH
) -> tuple[str, str | None, int]:
    """Return the shown text, the stop string and the number of tokens of a generation, pushed in pieces."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts or []), len(tokens)]
    generation, shown = OutputText(TOKENIZER, rules), ""
    for left, right in pairwise(edges):
        shown += generation.push(tokens[left:right], reason if right == len(tokens) else None)
        if generation.finish_reason is not None:
            break
    return shown, generation.stop_string, generation.num_tokens


@pytest.mark.parametrize(
    ("stop", "shown", "found"),
    [
        (["<|sp|>"], "abc", "<|sp|>"),
        (["<|sp|>d"], "abc", "<|sp|>d"),
        (["bc<|sp|>de"], "a", "bc<|sp|>de"),
        (["f<|other|>g", "<|spy|>"], "abcde", "f<|other|>g"),
        (["zz", "<|other|>"], "abcdef", "<|other|>"),
        (["<|sp|>x", "<|sp|><|other|>"], "abcdefghi", None),
        (["<|sp"], "abcdefghi", None),  # a part of its text is no name
        (["cd"], "ab", "cd"),  # the client sees no token in between
    ],
)
def test_a_stop_string_that_names_a_special_token_ends_the_text(stop: list[str], shown: str, found: str | None) -> None:
    source = random.Random(str(stop))
    for cuts in ([], list(range(30)), *([source.randrange(30), source.randrange(30)] for _ in range(10))):
        assert output(TextRules(stop=tuple(stop)), ALL, cuts)[:2] == (shown, found)


def test_the_token_that_completes_the_stop_string_is_the_last_one() -> None:
    assert output(TextRules(stop=("<|sp|>",)), ALL) == ("abc", "<|sp|>", 4)


def test_the_stop_string_can_be_kept_with_its_special_token() -> None:
    rules = TextRules(stop=("c<|sp|>d",), include_stop=True)
    assert output(rules, ALL, [2, 3, 4])[0] == "abc<|sp|>d"
    ended = TextRules(stop=("<|other|>",), include_stop=True)
    assert output(ended, "ab<|other|>", reason=FinishReason.STOP) == ("ab<|other|>", "<|other|>", 3)


@pytest.mark.parametrize("min_tokens", [4, 5])
def test_a_special_token_ends_no_text_before_min_tokens(min_tokens: int) -> None:
    shown = output(TextRules(stop=("<|sp|>",), min_tokens=min_tokens), "abc<|sp|>de<|sp|>f", list(range(9)))[0]
    assert shown == ("abc" if min_tokens == 4 else "abcde")


def test_shown_special_tokens_end_the_text_too() -> None:
    assert output(TextRules(stop=("<|other|>",), skip_special_tokens=False), ALL)[0] == "abc<|sp|>def"
    shown = TextRules(stop=("<|sp|>d",), shown_tokens=TOKENIZER.special_ids_of(["<|sp|>"]))
    assert output(shown, ALL, [4])[:2] == ("abc", "<|sp|>d")


def test_text_that_spells_a_special_token_ends_the_text_as_well() -> None:
    letters = [token for character in "a<|sp|>b" for token in TOKENIZER.encode(character, add_special_tokens=False)]
    assert OutputText(TOKENIZER, TextRules(stop=("<|sp|>",))).push(letters, None) == "a"


SYMBOLS = st.lists(st.sampled_from(["a", "b", "<|sp|>", "<|spy|>"]), max_size=20)
STOPS = st.lists(st.lists(st.sampled_from(["a", "b", "<|sp|>", "<|spy|>"]), min_size=1, max_size=3), max_size=3)


@settings(max_examples=500, deadline=None)
@given(symbols=SYMBOLS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=4))
def test_stop_strings_with_special_tokens_match_as_if_tokens_were_letters(
    symbols: list[str], stops: list[list[str]], cuts: list[int]
) -> None:
    named = {symbol for stop in stops for symbol in stop if symbol in SPECIAL}
    searched = [(place, symbol) for place, symbol in enumerate(symbols) if symbol in named or symbol not in SPECIAL]
    end = len(symbols)
    for last in range(1, len(searched) + 1):
        seen = [symbol for _, symbol in searched[:last]]
        longest = max((len(stop) for stop in stops if seen[-len(stop) :] == stop), default=0)
        if longest:
            end = searched[last - longest][0]
            break
    expected = "".join(symbol for symbol in symbols[:end] if symbol not in SPECIAL)
    assert output(TextRules(stop=tuple(map("".join, stops))), "".join(symbols), cuts)[0] == expected


@pytest.mark.parametrize(
    ("text", "start", "stop", "shown"),
    [
        ("<think>\nno HALT\n</think>\n\nThe HALT end", Start.OPEN, "HALT", "<think>\nno HALT\n</think>\n\nThe "),
        ("no HALT</think>The HALT end", Start.INSIDE, "HALT", "no HALT</think>The "),
        ("a HALT b", Start.AFTER, "HALT", "a "),
        ("a HALT b", Start.OPEN, "HALT", "a "),
        ("never ends: HALT", Start.INSIDE, "HALT", "never ends: HALT"),
        ("ab</think>cd", Start.INSIDE, "b</think>c", "ab</think>cd"),  # begins in the reasoning
        ("ab</think>cd", Start.INSIDE, "</think>", "ab</think>cd"),  # the mark is no part of the answer
        ("HA</think>LT", Start.INSIDE, "HALT", "HA</think>LT"),
        ("x</think>\n\nLine\nrest", Start.INSIDE, "\n", "x</think>\n\nLine"),  # white space belongs to the mark
        ("<thin HALT", Start.OPEN, "HALT", "<thin "),
        ("<thi", Start.OPEN, "hi", "<t"),
        ("<think>a<|sp|>b</think>c<|sp|>d", Start.OPEN, "<|sp|>", "<think>ab</think>c"),
    ],
)
def test_stop_strings_apply_to_the_answer_only(text: str, start: Start, stop: str, shown: str) -> None:
    rules, source = TextRules(stop=(stop,), reasoning=(THINK, start)), random.Random(text)
    for cuts in ([], list(range(60)), *([source.randrange(60), source.randrange(60)] for _ in range(20))):
        assert output(rules, text, cuts)[0] == shown


def test_reasoning_streams_while_stop_strings_wait() -> None:
    generation = OutputText(TOKENIZER, TextRules(stop=("HALT",), reasoning=(THINK, Start.OPEN)))

    def push(text: str) -> str:
        return generation.push(TOKENIZER.encode(text, add_special_tokens=False), None)

    assert [push("<th"), push("ink>H"), push("ALT </thi"), push("nk>A"), push(" HA"), push("LT")] == [
        *("", "<think>H", "ALT </thi", "nk>A", " ", "")
    ]
    assert generation.stop_string == "HALT"
