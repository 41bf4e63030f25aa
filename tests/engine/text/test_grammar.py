"""Grammars over the demo model's vocabulary, with random choices among the allowed tokens."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from engine.text.following import accepts, compiled
from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import compiled as compiled_module
from fastgen.text.grammars import masks as masks_module
from fastgen.text.grammars import matcher as matcher_module
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.grammars.limits import MOST_GRAMMAR_BYTES
from fastgen.text.grammars.matcher import GrammarMatcher
from fastgen.text.tokenizer import Tokenizer

VOCABULARY = 49152
ENDS = (0, 2)


@pytest.fixture(scope="module")
def factory(smollm2: Tokenizer) -> CompiledGrammars:
    return CompiledGrammars(lambda: smollm2, VOCABULARY, ENDS)


@pytest.fixture(scope="module")
def rehearsals(smollm2: Tokenizer) -> Iterator[GrammarChecker]:
    found = GrammarChecker(smollm2)
    yield found
    found.close()


def allowed(constraint: GrammarMatcher, vocabulary: int = VOCABULARY) -> list[int]:
    mask = np.zeros(-(-vocabulary // 32), np.uint32)
    constraint.fill_mask(mask.data)
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


def follow(constraint: GrammarMatcher, source: random.Random, *, most: int = 400) -> list[int]:
    """Return the tokens of a random match without its end token. An allowed end is chosen half of the time."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = allowed(constraint)
        assert choices
        ends = [token for token in choices if token in ENDS]
        assert ends in ([], list(ENDS)), "every end token of the model may end a match"
        token = source.choice(ends) if ends and source.random() < 0.5 else source.choice(choices)
        constraint.accept(token)
        if constraint.end is not None:
            assert constraint.end is FinishReason.STOP
            return tokens
        tokens.append(token)
    raise AssertionError("no end in sight")


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "grün", "緑"]}, "minItems": 2, "maxItems": 5},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date"},
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["when", "id", "score"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.get("type", "recursive"))
def test_any_choice_of_allowed_tokens_satisfies_the_schema(
    schema: dict[str, Any], factory: CompiledGrammars, smollm2: Tokenizer, rehearsals: GrammarChecker
) -> None:
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    rehearsals.check(grammar)
    for seed in range(5):
        text = smollm2.decode(follow(factory(grammar), random.Random(seed)))
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_json_object_allows_any_object(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    constraint = factory(Grammar(kind="json_object"))
    for token in smollm2.encode('{"a": [1, {"b": null}], "ü": "\\n"}', add_special_tokens=False):
        assert token in allowed(constraint)
        constraint.accept(token)
    assert allowed(constraint) == list(ENDS)
    assert smollm2.encode("[", add_special_tokens=False)[0] not in allowed(factory(Grammar(kind="json_object")))


@pytest.mark.parametrize(
    "pattern", ["(yes|no|maybe)", r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)", "[α-ω]{2,6}", "(🙂|🚀){1,3}"]
)
def test_any_choice_of_allowed_tokens_matches_the_regular_expression(
    pattern: str, factory: CompiledGrammars, smollm2: Tokenizer
) -> None:
    for seed in range(5):
        text = smollm2.decode(follow(factory(Grammar(kind="regex", text=pattern)), random.Random(seed)))
        assert re.fullmatch(pattern, text)


def test_a_lark_grammar_is_enforced(factory: CompiledGrammars, smollm2: Tokenizer, rehearsals: GrammarChecker) -> None:
    grammar = Grammar(kind="lark", text='start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/')
    rehearsals.check(grammar)
    text = smollm2.decode(follow(factory(grammar), random.Random(1)))
    assert re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}", text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9}, "4", "3"),
        ({"type": "string", "format": "password"}, '"x"', "x"),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a":1}', "{1}"),
    ],
)
def test_a_schema_within_a_grammar_is_enforced_like_one_alone(schema: dict[str, Any], good: str, bad: str) -> None:
    for text in (
        f'start: "<" %json {json.dumps(schema)} ">" | "%json"',
        f'start: "<" %lark {{\nstart: %json\n{json.dumps(schema, indent=1)} // %json {{\n}} ">"',
    ):
        grammar = compiled(Grammar(kind="lark", text=text))
        assert accepts(grammar, f"<{good}>")
        assert not accepts(grammar, f"<{bad}>")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('%json {"$ref": "#"}', "a schema refers to itself for the same value"),
        ('%json {"const": -9223372036854775808}', "const: -9223372036854775808"),
        ('%json {"type": "array", "uniqueItems": true}', "uniqueItems: cannot be enforced"),
        ("%json 3", "must be a schema"),
        ("%json {", "failed to parse"),
    ],
)
def test_a_schema_within_a_grammar_is_rejected_like_one_alone(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        compiled(Grammar(kind="lark", text=f'start: "b" | "a" {text}'))
    assert raised.value.param == "guided_grammar"


def test_a_schema_with_options_of_the_library_is_left_as_it_is() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False}, "type": "object", "required": ["a"]}
    grammar = compiled(Grammar(kind="lark", text=f"start: %json {json.dumps(schema)}"))
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{ "a":1}')


def test_special_tokens_do_not_match_text(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    tokens = allowed(factory(Grammar(kind="regex", text="[^x]{1,200}")))
    assert tokens
    assert smollm2.special_token_ids.isdisjoint(tokens)


def test_logit_columns_without_a_token_are_never_allowed(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    grammar = Grammar(kind="regex", text="[^x]{1,200}")
    for missing in (1, 50):
        padded = CompiledGrammars(lambda: smollm2, VOCABULARY + missing, ENDS)
        assert allowed(padded(grammar), VOCABULARY + missing) == allowed(factory(grammar))


def test_forced_text_uses_the_tokenizers_tokens(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    text = "the identification"
    constraint = factory(Grammar(kind="regex", text=text))
    tokens = smollm2.encode(text, add_special_tokens=False)
    for token in tokens:
        assert allowed(constraint) == [token]
        constraint.accept(token)
    assert allowed(constraint) == list(ENDS)


def test_text_spelled_like_a_special_token_can_match_as_text(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    tokens = follow(factory(Grammar(kind="regex", text=r"<\|im_end\|>ok")), random.Random(0))
    assert smollm2.special_token_ids.isdisjoint(tokens)
    assert smollm2.decode(tokens) == "<|im_end|>ok"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "JSON schema"),
        ("json_schema", "3", "JSON schema"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"enum": []}', "empty"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "no integer is within the bounds"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.org/schema.json"}', "example.org"),
        ("json_schema", '{"a":' * 3000, "nested too deeply"),
        ("json_schema", '{"type": "object"}}, {"json_schema": {}', "Extra data"),
        ("regex", "((", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a\ud800", "surrogate"),
        ("lark", "start: x", 'unknown name: "x"'),
        ("lark", "start: start", "nothing can match"),
        ("lark", "", "no start rule found"),
        ("lark", 'start: <|no_such_token|> "a"', "no_such_token"),
    ],
)
def test_an_invalid_grammar_is_rejected_with_a_one_line_error(
    kind: Any, text: str, message: str, factory: CompiledGrammars, rehearsals: GrammarChecker
) -> None:
    grammar = Grammar(kind=kind, text=text)
    for judge in (lambda: rehearsals.check(grammar), lambda: factory(grammar)):
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            judge()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert caught.value.param in ("response_format", "guided_regex", "guided_grammar")


def test_a_model_without_end_tokens_rejects_grammars(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        CompiledGrammars(lambda: smollm2, VOCABULARY, ())(Grammar(kind="json_object"))


def test_a_cached_grammar_starts_in_its_initial_state(factory: CompiledGrammars, smollm2: Tokenizer) -> None:
    grammar = Grammar(kind="regex", text="(left|right)")
    first = factory(grammar)
    start = allowed(first)
    first.accept(smollm2.encode("left", add_special_tokens=False)[0])
    assert allowed(first) != start
    assert allowed(factory(grammar)) == start


def test_a_match_that_the_library_gives_up_ends_with_an_error(
    factory: CompiledGrammars, smollm2: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = factory(Grammar(kind="regex", text="abc"))
    constraint.accept(smollm2.encode("z", add_special_tokens=False)[0])
    assert allowed(constraint) == list(ENDS), "something has to come"
    assert constraint.end is FinishReason.GRAMMAR
    constraint.accept(ENDS[0])
    assert constraint.end is FinishReason.GRAMMAR
    assert "could not be followed" in caplog.text


def test_masks_computed_in_parallel_equal_those_computed_one_by_one(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "WAIT_SECONDS", 60.0)  # on a busy machine, a mask would be late
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", 60.0)
    factory = CompiledGrammars(lambda: smollm2, VOCABULARY + 50, ENDS, num_threads=2)
    source = random.Random(0)
    grammars = [Grammar(kind="json_schema", text=json.dumps(schema)) for schema in SCHEMAS]
    grammars += [Grammar(kind="regex", text=text) for text in ("[a-z]{3,8}", "the identification", "(🙂|🚀){1,3}")]
    constraints = [factory(grammar) for grammar in grammars]
    failed = factory(Grammar(kind="regex", text="abc"))
    failed.state.consume_token(smollm2.encode("z", add_special_tokens=False)[0])
    constraints.insert(2, failed)
    for _ in range(8):
        together = np.full((len(constraints), -(-(VOCABULARY + 50) // 32)), 7, np.uint32)
        factory.fill_masks(constraints, together.reshape(-1).data)
        assert failed.end is FinishReason.GRAMMAR
        for constraint, mask in zip(constraints, together, strict=True):
            alone = np.zeros_like(mask)
            constraint.fill_mask(alone.data)
            assert np.array_equal(mask, alone)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            constraint.accept(source.choice(tokens))
        constraints = [constraint for constraint in constraints if constraint.end is None or constraint is failed]


def test_a_set_of_tokens_allows_the_same_tokens_at_every_position(smollm2: Tokenizer) -> None:
    factory = CompiledGrammars(lambda: smollm2, VOCABULARY, ENDS, num_threads=2)
    tokens = factory(Grammar(kind="tokens", text="0,5,49151"))
    others = [factory(Grammar(kind="regex", text="a+")) for _ in range(2)]
    masks = np.zeros((3, -(-VOCABULARY // 32)), np.uint32)
    factory.fill_masks([others[0], tokens, others[1]], masks.reshape(-1).data)
    assert np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist() == [0, 5, 49151]
    assert np.array_equal(masks[0], masks[2])
    tokens.accept(5)
    assert allowed(tokens) == [0, 5, 49151]  # type: ignore[arg-type]
    assert tokens.end is None


def test_a_grammar_is_compiled_once_for_requests_that_come_together(factory: CompiledGrammars) -> None:
    grammar = Grammar(kind="regex", text="(once|only)")
    first, second = factory.compile(grammar), factory.compile(grammar)
    assert first is second
    assert first.result()() is not second.result()()


def test_a_grammar_that_failed_is_not_kept(factory: CompiledGrammars) -> None:
    grammar = Grammar(kind="regex", text="(never")
    first = factory.compile(grammar)
    assert first.exception() is not None
    assert factory.compile(grammar) is not first


def test_a_grammar_whose_lexer_has_reached_a_limit_is_compiled_again(
    factory: CompiledGrammars, smollm2: Tokenizer
) -> None:
    """All generations of a compiled grammar share the library's lexer, so it fails for the next ones, too."""
    grammar = Grammar(kind="regex", text="(b){100000}c|x")
    (b,), (x,) = (smollm2.encode(text, add_special_tokens=False) for text in "bx")
    other, failing = factory(grammar), factory(grammar)
    failing.accept(b)
    for _ in range(4):
        failing.accept(allowed(failing)[0])
    assert failing.end is FinishReason.GRAMMAR
    allowed(other)
    assert other.end is FinishReason.GRAMMAR
    assert {b, x} <= set(allowed(factory(grammar)))


def test_grammars_take_at_most_so_much_memory_and_end_before_others_suffer() -> None:
    """In a process of its own, without memory that was used before."""
    mebibytes = 96
    program = f"from engine.text.heavy_grammars import main; main({mebibytes}, 40)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    result = json.loads(shown)
    assert result["growth"] < 1.4 * mebibytes
    assert result["plain"] == {"end": None, "tokens": 40}
    assert 4 < result["unfinished"] < 12, "as many as fit go on"
    assert result["unfinished"] + result["too complex"] == 40


def test_a_grammar_of_too_many_bytes_is_rejected_with_the_limit(rehearsals: GrammarChecker) -> None:
    properties = {f"property_{number}": {"type": "string"} for number in range(3000)}
    text = json.dumps({"type": "object", "properties": properties})
    with pytest.raises(RequestError, match=rf"it has {len(text)} bytes, and at most {MOST_GRAMMAR_BYTES}") as error:
        rehearsals.check(Grammar(kind="json_schema", text=text))
    assert error.value.param == "response_format"


@pytest.mark.parametrize(
    ("limits", "kind", "text", "message"),
    [
        ({"max_grammar_size": 20}, "lark", "start: " + '"ab" "cd"? ' * 30, "grammar size"),
        ({"max_lexer_states": 2}, "regex", "(a|b)*a(a|b){6}c", "cannot be used"),
    ],
)
def test_the_work_that_a_grammar_may_cause_is_limited(
    limits: dict[str, int],
    kind: Any,
    text: str,
    message: str,
    factory: CompiledGrammars,
    rehearsals: GrammarChecker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rehearsals.check(Grammar(kind=kind, text=text))
    limited = llguidance.LLParserLimits(verbose_errors=False, **limits)
    monkeypatch.setattr(compiled_module, "limits", lambda: limited)
    with pytest.raises(RequestError, match=message):
        factory(Grammar(kind=kind, text=text))


def test_a_generation_whose_masks_take_seconds_is_given_up(
    factory: CompiledGrammars, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    constraint, other = (factory(Grammar(kind="regex", text="[ab]{5}")) for _ in range(2))
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: float(next(clock)))  # a second each
    token = smollm2.encode("a", add_special_tokens=False)[0]
    for _ in range(2):
        assert token in allowed(constraint)
        constraint.accept(token)
    assert allowed(constraint) == list(ENDS)
    assert constraint.end is FinishReason.GRAMMAR
    assert token in allowed(other), "each generation has its own time"


def test_text_that_must_follow_without_end_is_not_searched_for_its_end() -> None:
    endless = compiled(Grammar(kind="lark", text='start: %json {"type": "object"} T "a"\nT: /(ab)+/'))
    for byte in b"{}abab":
        assert endless.consume_token(byte)
        assert any(endless.compute_bitmask())
