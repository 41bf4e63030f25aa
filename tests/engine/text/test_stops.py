"""Stop strings: those that name special tokens, and those that appear in the reasoning."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.generations import output_text
from engine.text.matching import byte_tokenizer
from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.think import Think
from fastgen.text.special_stops import SpecialStops
from fastgen.text.stop_strings import StopStrings, given_stop_strings

SPECIAL = ("<|sp|>", "<|spy|>", "<|other|>")
TOKENIZER = byte_tokenizer(None, *SPECIAL)
ALL = "abc<|sp|>def<|other|>ghi"
THINK = Think()


def output(
    rules: dict[str, Any], text: str, cuts: list[int] | None = None, reason: FinishReason | None = FinishReason.LENGTH
) -> tuple[str, str | None, int]:
    """Return the shown text, the stop string and the number of tokens of a generation, pushed in pieces."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts or []), len(tokens)]
    generation, shown = output_text(TOKENIZER, **rules), ""
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
        assert output({"stop": tuple(stop)}, ALL, cuts)[:2] == (shown, found)


def test_the_token_that_completes_the_stop_string_is_the_last_one() -> None:
    assert output({"stop": ("<|sp|>",)}, ALL) == ("abc", "<|sp|>", 4)


def test_the_stop_string_can_be_kept_with_its_special_token() -> None:
    rules = {"stop": ("c<|sp|>d",), "include_stop": True}
    assert output(rules, ALL, [2, 3, 4])[0] == "abc<|sp|>d"
    ended = {"stop": ("<|other|>",), "include_stop": True}
    assert output(ended, "ab<|other|>", reason=FinishReason.STOP) == ("ab<|other|>", "<|other|>", 3)


@pytest.mark.parametrize("min_tokens", [4, 5])
def test_a_special_token_ends_no_text_before_min_tokens(min_tokens: int) -> None:
    shown = output({"stop": ("<|sp|>",), "min_tokens": min_tokens}, "abc<|sp|>de<|sp|>f", list(range(9)))[0]
    assert shown == ("abc" if min_tokens == 4 else "abcde")


def test_shown_special_tokens_end_the_text_too() -> None:
    assert output({"stop": ("<|other|>",), "skip_special_tokens": False}, ALL)[0] == "abc<|sp|>def"
    shown = {"stop": ("<|sp|>d",), "marks": ("<|sp|>",)}
    assert output(shown, ALL, [4])[:2] == ("abc", "<|sp|>d")


def test_text_that_spells_a_special_token_ends_the_text_as_well() -> None:
    letters = [token for character in "a<|sp|>b" for token in TOKENIZER.encode(character, add_special_tokens=False)]
    assert output_text(TOKENIZER, stop=("<|sp|>",)).push(letters, None) == "a"


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
    assert output({"stop": tuple(map("".join, stops))}, "".join(symbols), cuts)[0] == expected


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
    rules, source = {"stop": (stop,), "reasoning": THINK, "start": start}, random.Random(text)
    for cuts in ([], list(range(60)), *([source.randrange(60), source.randrange(60)] for _ in range(20))):
        assert output(rules, text, cuts)[0] == shown


def test_reasoning_streams_while_stop_strings_wait() -> None:
    generation = output_text(TOKENIZER, stop=("HALT",), reasoning=THINK, start=Start.OPEN)

    def push(text: str) -> str:
        return generation.push(TOKENIZER.encode(text, add_special_tokens=False), None)

    assert [push("<th"), push("ink>H"), push("ALT </thi"), push("nk>A"), push(" HA"), push("LT")] == [
        *("", "<think>H", "ALT </thi", "nk>A", " ", "")
    ]
    assert generation.stop_string == "HALT"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "found"),
    [
        (["<|sp|>"], "ab", "<|sp|>"),
        (["b<|sp|>"], "a", "b<|sp|>"),
        (["b<|sp|>", "<|sp|>"], "a", "b<|sp|>"),  # complete at the same token
        (["c<|sp|>"], "ab", None),
        (["<|spy|>"], "ab", None),
    ],
)
def test_a_stop_string_may_name_the_token_that_ended_the_generation(
    stop: list[str], shown: str, found: str | None, keeps: bool
) -> None:
    rules = {"stop": tuple(stop), "include_stop": keeps}
    expected = (shown + (found or "") if keeps else shown, found, 3)
    for cuts in ([], [1, 2], [2]):
        assert output(rules, "ab<|sp|>", cuts, FinishReason.STOP) == expected


@pytest.mark.parametrize(
    ("stops", "shown", "found"),
    [
        (["two", "tw"], "one ", "tw"),  # the shorter one is complete first
        (["wo", "two", "e two"], "on", "e two"),  # the longest of those complete at the same character
        (["o th", "two three"], "one tw", "o th"),
        (["e tw", "ne"], "o", "ne"),
        (["n", "one"], "o", "n"),
        (["one two three"], "", "one two three"),
        (["one two three "], "one two three", None),
        (["one twx", "e two t"], "on", "e two t"),
        ([" t", " t"], "one", " t"),
    ],
)
def test_of_overlapping_stop_strings_the_first_complete_one_counts(
    stops: list[str], shown: str, found: str | None
) -> None:
    for cuts in ([], list(range(20)), [3], [4, 5], [2, 7]):
        assert output({"stop": tuple(stops)}, "one two three", cuts)[:2] == (shown, found)
        kept = output({"stop": tuple(stops), "include_stop": True}, "one two three", cuts)[0]
        assert kept == shown + (found or "")


@pytest.mark.parametrize(
    ("stop", "min_tokens", "shown"),
    [
        ("aba", 3, ""),
        ("aba", 4, "ab"),
        ("aba", 5, "ab"),
        ("aba", 6, "abab"),
        ("bab", 9, "ababababa"),
        ("ba", 8, "abababa"),
    ],
)
def test_a_stop_string_that_overlaps_itself_ends_the_text_from_min_tokens_on(
    stop: str, min_tokens: int, shown: str
) -> None:
    for cuts in ([], list(range(9)), [4]):
        assert output({"stop": (stop,), "min_tokens": min_tokens}, "ababababa", cuts)[0] == shown


def test_stop_strings_cost_the_same_however_long_and_alike_they_are() -> None:
    stops = ["a" * 1023 + "b", *(f"{chr(0x100 + number)}{'a' * 1023}" for number in range(63))]
    searched = StopStrings(stops)
    began = time.thread_time()
    for _ in range(400):
        assert searched.push("aaaa")[1] is None
    assert time.thread_time() - began < 1  # before, 10 s
    assert searched.push("b")[1] == stops[0]


def test_the_special_tokens_of_stop_strings_are_looked_for_once_in_a_request() -> None:
    vocabulary, hidden = TOKENIZER.vocabulary, TOKENIZER.special_token_ids
    first = SpecialStops.of(("<|sp|>",), vocabulary, hidden)
    assert SpecialStops.of(("<|sp|>",), vocabulary, frozenset(list(hidden))) is first
    assert SpecialStops.of(("<|sp|>",), vocabulary, hidden - TOKENIZER.added_ids_of(["<|sp|>"])) is not first


@pytest.mark.parametrize(
    ("given", "stops"),
    [(None, ()), ([], ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
)
def test_a_program_gives_a_stop_string_or_several(given: Any, stops: tuple[str, ...]) -> None:
    assert given_stop_strings(given) == stops


@pytest.mark.parametrize("given", ["", [""], ["a", ""], [5], 5, {"a": 1}, b"a", [None]])
def test_a_program_that_gives_an_empty_stop_string_or_none_is_told(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^stop: ") as rejection:
        given_stop_strings(given)
    assert rejection.value.param == "stop"
