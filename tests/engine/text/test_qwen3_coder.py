"""Qwen3-Coder's calls: bare values between tags, which become JSON by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.matching import byte_tokenizer, matches
from fastgen.core.sampling_params import Grammar
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.output_events import CallArguments, Collected
from fastgen.text.tools.format import OfferedTool
from fastgen.text.tools.parameter_values import ParameterSchema
from fastgen.text.tools.qwen3_coder import Qwen3Coder
from fastgen.text.tools.registry import call_grammar

FORMAT = Qwen3Coder()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "point": {"$ref": "#/$defs/point"},
        "colour": {"allOf": [{"$ref": "#/$defs/colour"}]},
        "direct_colour": {"$ref": "#/$defs/colour"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "maybe_count": {"type": ["integer", "null"]},
        "either": {"type": ["integer", "string"]},
        "level": {"enum": [1, 2, "high"]},
        "tree": {"$ref": "#/$defs/tree"},
        "anything": {},
    },
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "colour": {"enum": ["red", "green"]},
        "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, {"$ref": "#/$defs/tree"}]},
    },
    "required": ["text"],
}
TOOL = OfferedTool("f", SCHEMA)
# The part of the model's template that renders calls.
TEMPLATE = """\
{%- for tool_call in messages[0].tool_calls %}
    {{- '<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
    {%- for name, value in tool_call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
    {{- '' if loop.last else '\\n' }}
{%- endfor %}"""


def shown(*calls: dict[str, Any]) -> str:
    """Return calls with these arguments as the template renders them."""
    written = [{"type": "function", "function": {"name": "f", "arguments": arguments}} for arguments in calls]
    return ChatTemplate(TEMPLATE, {}).render([{"role": "assistant", "content": "", "tool_calls": written}])


def read(pieces: list[str]) -> tuple[str, list[Any]]:
    parser, collected = FORMAT.parser([TOOL]), Collected()
    collected.take([event for piece in pieces for event in parser.push(piece)] + parser.finish())
    return collected.content, [json.loads(call.arguments) for call in collected.calls]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", "null", "null"),
        ("text", ' {"a": 1}', ' {"a": 1}'),
        ("not_declared", "12", "12"),
        ("anything", "12", "12"),
        ("count", "12", 12),
        ("count", " -3\n", -3),
        ("count", "twelve", "twelve"),
        ("count", "None", None),
        ("share", "0.50", 0.5),
        ("share", "NaN", "NaN"),
        ("sure", "true", True),
        ("sure", "False", False),
        ("sure", "perhaps", "perhaps"),
        ("list", '[{"x": 1}]', [{"x": 1}]),
        ("list", "[1, 2", "[1, 2"),
        ("point", '{\n"x": "a\nb"}', {"x": "a\nb"}),
        ("point", "[" * 100_000, "[" * 100_000),
        ("colour", "red", "red"),
        ("direct_colour", "true", "true"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "nothing", "nothing"),
        ("maybe", "12", "12"),
        ("maybe_count", "12", 12),
        ("maybe_count", "null", None),
        ("either", "12", 12),
        ("either", "twelve", "twelve"),
        ("either", "true", "true"),
        ("level", "2", 2),
        ("level", "high", "high"),
        ("tree", "[[], []]", [[], []]),
        # Python's spelling.
        ("list", "['a', \"b\", None]", ["a", "b", None]),
        ("point", "{'x': True, 'y': 'é'}", {"x": True, "y": "é"}),
        ("list", "{1, 2}", "{1, 2}"),
        ("list", "(1, 2)", "(1, 2)"),
        ("point", "{'x': b'a'}", "{'x': b'a'}"),
        ("point", "{'x': 1e999}", "{'x': 1e999}"),
        ("point", "{'x': f()}", "{'x': f()}"),
        ("text", "['a']", "['a']"),
        ("count", "['a']", "['a']"),
        *(("list", text, text) for text in ("[" + "-" * 50_000 + "1]", "[" + "1+" * 50_000 + "1]", "[" + "(" * 50_000)),
    ],
)
def test_a_value_is_converted_by_its_schema(name: str, written: str, value: object) -> None:
    assert json.loads(ParameterSchema(SCHEMA, name).value(written)) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1], "required": 3},
        {"properties": {"a": 1}, "required": [{}, "b"]},
        {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": 3}}},
        {"properties": {"a": {"anyOf": 1, "enum": 2, "type": {}}, "b": {"type": [1]}}},
    ],
)
def test_an_invalid_schema_does_not_break_the_parser(schema: dict[str, Any]) -> None:
    tool = OfferedTool("f", schema)
    assert json.loads(ParameterSchema(schema, "a").value("x")) == "x"
    FORMAT.rules([tool], json.dumps, most_calls=None)


# Values are written without escapes. A closing tag before another tag cannot be told from the end of the value.
PIECES = ["a", '"', "\\", "\n", "\t", " ", "<", ">", "=", "é", "</parameter>", "</parameter", "parameter>"]
TEXT = st.lists(st.sampled_from(PIECES)).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXT},
    optional={
        "count": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "sure": st.booleans(),
        "list": st.lists(st.fixed_dictionaries({"x": st.integers()}), max_size=2),
        "point": st.fixed_dictionaries({"x": st.integers()}, optional={"y": TEXT}),
        "colour": st.sampled_from(["red", "green"]),
        "maybe": st.sampled_from(["", "\n", "a", None]),
        "maybe_count": st.none() | st.integers(),
    },
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_a_rendered_call_is_parsed_back_unchanged(calls: list[dict[str, Any]]) -> None:
    text = shown(*calls)
    assert read([text]) == ("", calls)
    assert read(list(text)) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "Close it with </parameter> here.",
        "<a>\n</parameter>\n</a>",
        "</parameter>",
        "\n</parameter>",
        "</parameter></parameter>\n",
        "</parameter>\n</functional>",
    ],
)
def test_a_closing_tag_that_no_other_tag_follows_is_text_of_the_value(text: str) -> None:
    for arguments in ({"text": text}, {"text": "a", "point": {"x": 1, "y": text}}, {"text": text, "count": 3}):
        written = shown(arguments, arguments)
        assert read([written]) == read(list(written)) == ("", [arguments] * 2)


@pytest.mark.parametrize("rest", ["", "\n", "\n</function", "\n</function>", "</tool_call>", "<tool_call>"])
def test_a_value_that_was_closed_is_complete_wherever_the_generation_ends_behind_it(rest: str) -> None:
    written = f"<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>{rest}"
    assert read([written])[1] == read(list(written))[1] == [{"text": "a"}]


@pytest.mark.parametrize(
    ("written", "value"), [("none", "none"), ("None", None), ("null", None), ("1", "1"), ("2", 2), ("true", "true")]
)
def test_text_that_is_one_of_the_choices_is_that_choice(written: str, value: object) -> None:
    schema = {"properties": {"a": {"enum": ["none", None, "1", 1, 2, "true", True]}}}
    assert json.loads(ParameterSchema(schema, "a").value(written)) == value


def test_text_values_are_streamed() -> None:
    parser = FORMAT.parser([TOOL])
    begun = parser.push("<tool_call>\n<function=f>\n<parameter=text>\nline one\nline")
    assert "".join(event.text for event in begun if isinstance(event, CallArguments)) == '{"text": "line one\\nline'
    assert parser.push(" two\n") == [CallArguments(0, " two")]
    assert parser.push("</param") == []
    assert parser.push("s") == [CallArguments(0, "\\n</params")]


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    made = call_grammar(FORMAT, [TOOL], byte_tokenizer(None), most_calls=None)
    GrammarChecker(byte_tokenizer(None)).check(made)
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": ""},
        {"text": "a\n\n<b></parameter"},
        {"text": "a", "count": 3, "share": 0.5, "sure": True, "list": [{"x": 1}], "point": {"x": 2}},
        {"text": "a", "direct_colour": "red", "maybe": None, "maybe_count": None, "level": "high", "anything": "b"},
    ],
)
def test_the_grammar_allows_every_rendered_call(grammar: Grammar, arguments: dict[str, Any]) -> None:
    assert matches(grammar, byte_tokenizer(None), shown(arguments))
    assert matches(grammar, byte_tokenizer(None), shown(arguments, arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"count": 1},
        {"text": "a", "count": "b"},
        {"text": "a", "list": [{"x": "y"}]},
        {"text": "a", "direct_colour": "blue"},
        {"text": "a", "level": 3},
        {"text": "a", "maybe_count": 0.5},
        {"text": "a", "not_declared": "b"},
    ],
)
def test_a_required_call_satisfies_its_schema(grammar: Grammar, arguments: dict[str, Any]) -> None:
    assert not matches(grammar, byte_tokenizer(None), shown(arguments))


def test_a_tool_without_declared_parameters_accepts_any_unless_forbidden() -> None:
    tokenizer = byte_tokenizer(None)
    for schema, allowed in (({}, True), ({"type": "object", "additionalProperties": False}, False)):
        grammar = call_grammar(FORMAT, [OfferedTool("f", schema)], tokenizer, most_calls=1)
        GrammarChecker(tokenizer).check(grammar)
        assert matches(grammar, tokenizer, shown({}))
        assert matches(grammar, tokenizer, shown({"a": "1", "b": "2"})) == allowed
        assert not matches(grammar, tokenizer, shown({}, {}))
