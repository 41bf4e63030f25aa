"""A grammar whose matches come to a rule or a terminal that matches no text is rejected by its name."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from engine.text.following import DeadEnd, TooComplex, compiled, follow
from engine.text.matching import byte_tokenizer
from engine.text.random_grammars import RandomGrammars
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import empty_rules
from fastgen.text.grammars.checker import GrammarChecker

BACK = 'start: "b" | "a" '


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    found = GrammarChecker(byte_tokenizer(None))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (f"{BACK} r\nr: r", "rule r"),
        (f'{BACK} r\nr: "c" r', "rule r"),
        (f'{BACK} r\nr: "c" r | "d" r+ | "e" (r | "f" r)', "rule r"),
        (f'{BACK} r?\nr: "c" r', "rule r"),
        (f'{BACK} [r]\nr: "c" r', "rule r"),
        (f'{BACK} r{{0,3}}\nr: "c" r ~ 2', "rule r"),
        (f'{BACK} r{{,3}}\nr: "c" r{{2,}}', "rule r"),
        (f'{BACK} r\nr: "c" (r ("d"))', "rule r"),
        (f'{BACK} ("c" ("d" r))\nr: "c" (r)', "rule r"),
        ('start: "a" p\np: "b" o\no: "c" q\nq: r "d"\nr: q "e"', "rule q"),
        (f'{BACK} p\np: "c" q\nq: r "d"\nr: q "e"', "rule q"),
        (f'{BACK} p\np: /c/\n | "d" r -> alias\n | "e"\nr: "c" r', "rule r"),
        (f'{BACK} r\nr[capture]: "c" r // "d"\n# r: "e"', "rule r"),
        (f'{BACK} %lark {{\nstart: r\nr: "x" r\n}}\nr: "c"', "rule r"),
        (r'start: "b" | r' + "\nr: %lark {\nstart: r\n" + r'r: "x" | "y" /[^\s\S]/' + "\n}", r"/[^\s\S]/"),
        (f'{BACK} r::0\nr::_: "c" r::incr([0:3]) | "d" r::_ %if and(bit_clear(1), lt(_, 4))', "rule r"),
        (
            f'{BACK} p::0x0f\np::_: "x" r::set_bit(1) | "z" %if bit_set(1)\n'
            'r::_: "c" (r::_ | "x" r::bit_or(0x2)) | "d" r::_',
            "rule r",
        ),
        (BACK + 'r::0\nr::_: /[^\\s\\S]/ %if is_zeros(_) | "c"', r"/[^\s\S]/"),
        (BACK + r"/[^\s\S]/", r"/[^\s\S]/"),
        (BACK + r"%regex {'substring_chars': 'x'} T".replace("'", '"') + "\nT: /x/ & /y/", "T"),
        (BACK + "(/x/ T | U V)\nT: /x/ & ~/y/\nU: /x/ & ~/x|y/\nV: /v/", "U"),
        (BACK + "T\nT: U V\nU: /u/\nV: /x{20}/ & /x{19}y/", "T"),
        (BACK + "r\nr[stop=/c/, max_tokens=3]: " + r"/[^\s\S]/", r"/[^\s\S]/"),
    ],
)
def test_what_matches_no_text_is_named(text: str, part: str, checker: GrammarChecker) -> None:
    with pytest.raises(RequestError, match=rf"(the|:) {re.escape(part)} (never ends|matches no text); .*remove it"):
        checker.check(Grammar(kind="lark", text=text))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('start: r::0\nr::_: "a" r::incr(_) %if lt(_, 500) | "b" %if lt(_, 500)', "r::500"),
        ('start: r::0\nr::_: "a" r::incr([0:4]) | "b" %if eq(_, 7)\n | "c" r::decr([0:3]) %if ge(_, 500)', "r::15"),
        ('start: "x" | "y" p\np: "z" r::7\nr::_: "a" r::bit_and(6) %if bit_set(0) | "b" %if eq(_, 9)', "r::6"),
        (
            'start: p::0\np::_: "a" p::set_bit(0) %if bit_clear(0) | "b" p::set_bit(1) %if bit_clear(1)\n'
            ' | "" %if is_ones([0:3])\n | "d" %if bit_count_lt(_, 2)',
            "p::3",
        ),
        ('start: r::0\nr::_: "a" ("b" | "c" (r::incr(_))) %if not(gt(_, 300))', "r::301"),
        ('start: r::0\nr::_: "b" | "c" ("d" %if lt(_, 0)) %if eq(_, 3) | "a" r::incr(_) %if ne(_, 3)', "r::3"),
        ('start: "b" | %lark {\nstart: r::0\nr::_: "a" r::incr(_) %if lt(_, 200) | "b" %if lt(_, 200)\n}', "r::200"),
    ],
)
def test_a_value_of_a_parameter_without_a_match_is_named(text: str, rule: str, checker: GrammarChecker) -> None:
    with pytest.raises(RequestError, match=f"no match of {rule} ends, and a generation may come to it; add an alt"):
        checker.check(Grammar(kind="lark", text=text))


@pytest.mark.parametrize(
    "text",
    [
        'start: "b"\nr: r\nT: /x/ & /y/',
        'start: (("a")) | "b" r\nr: "c" r? | "d" r*',
        'start: "b" r\nr: "c" r{0,2} "d"',
        'start: "b" r\nr: "c" r{,2} "d"',
        'start: "b" r\nr: "c" r -> alias\n | "d"',
        'start: "b" r\nr: "c" r ~ 0..2 "d"',
        'start: "b" r\nr: "c" [r] "d"',
        'start: "b" r\nr: "c" ("d" | r)',
        'start: "a".."z" | r\n | "x" -> alias\nr: s "c"\ns: "d" | r "e" | r "f"',
        'start: /a\\/b[^"]/i "//" "\\"" %json {"enum": ["r: r", "\\"\\n}"],\n "title": "|"} | <[1-3]> //r\n\nr: r',
        'start: X _Y INT WORD\nX: "x" | _Y\n | "z"\n_Y: "y"\n%import common.INT\n%import common (WORD)\n%ignore / /',
        'start: "a" %lark {\nstart: r\nr: "x" r | "y"\n} r\nr: "c"',
        'start: p::0x0\np::_: "a" %if is_ones([0:3]) | "b" p::incr([0:3])',
        'start: p::0x0\np::_: "" %if is_ones([0:2]) | "a" p::set_bit(0) %if bit_clear(0) | p::set_bit(1) x0\nx0: "c"',
        'start: p::0\np::_: "b" p::incr(_) %if lt(_, 20) | q::_\nq::_: "a" q::incr(_) %if lt(_, 20) | ""',
        # An alternative whose first rule has no match is left out, and so is an optional rule without one.
        'start: l::0\nl::_: i::_ l::incr(_) | "."\ni::_: "x" %if lt(_, 5)',
        'start: l::0\nl::_: "a" i::_? l::incr(_) %if le(_, 300) | "."\ni::_: "x" %if lt(_, 5)',
        'start: r::0\nr::_: "a" r::incr(_) %if lt(_, 900) | "." %if ge(_, 900)',
        'start: p::0x1f\np::_: "a" p::decr([2:4]) %if gt([2:4], 0x1) | "" %if or(is_zeros([3:4]), true)',
        # Values that are not reached, or too many to look at.
        'start: r::0\nr::_: "a" r::incr([0:2]) %if lt(_, 9) | "." %if le(_, 3) | "x" r::set_bit(9) %if gt(_, 3)',
        'start: r::0\nr::_: "a" r::incr(_) %if lt(_, 500000) | "b" %if lt(_, 500000)',
        'start: "a"\r\n | r\r\nr: "b"\r\n',
    ],
)
def test_what_can_end_is_accepted(text: str, checker: GrammarChecker) -> None:
    checker.check(Grammar(kind="lark", text=text))
    assert not empty_rules.empty_part(text, lambda _: False)


def test_syntax_that_is_not_known_is_left_to_the_library() -> None:
    for text in ("start: r\nr: r ? { 'x'", "start: (", "start: %json {", "start: r{", "start: r ~", "start", "\ud800:"):
        assert not empty_rules.empty_part(text, lambda _: False)
    assert not empty_rules.empty_part("start: " + "(" * 5000, lambda _: False)


def test_no_match_of_a_rule_that_is_named_ends() -> None:
    found = 0
    for seed in range(300):
        text = RandomGrammars(seed).lark()
        named = re.search(r"the rule (\S+) never ends", empty_rules.empty_part(text, lambda _: False))
        if named is None or len(text) > 3000:
            continue
        try:
            matcher = compiled(Grammar(kind="lark", text=re.sub(r"^start: .*", f"start: {named[1]}", text)))
        except RequestError:
            continue  # invalid, or nothing matches it
        found += 1
        with suppress(DeadEnd, TooComplex):
            assert not follow(matcher, random.Random(0)).is_complete
    assert found > 3
