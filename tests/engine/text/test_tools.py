"""Tool calls as models write them: parsed for any split of the text, and enforced by grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.matching import byte_tokenizer, matches
from fastgen.core.sampling_params import Grammar
from fastgen.settings import TOOL_FORMATS
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.output_events import CallArguments, CallBegun, Collected, OutputEvent
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.plain_json import Llama3Json, PlainJson
from fastgen.text.tools.qwen3_coder import Qwen3Coder
from fastgen.text.tools.registry import call_grammar, choose_format, describe_tools

OFFERED = [OfferedTool("f", {}), OfferedTool("g", {})]
Found = tuple[str, list[tuple[str, str]]]
HERMES, LLAMA, PLAIN, LISTS, ARGS = Hermes(), Llama3Json(), PlainJson(), Mistral(), MistralArguments()
CODER = Qwen3Coder()

ANSWERS: list[tuple[ToolFormat, str, Found]] = [
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"b": 1}, "name": "g"}\n</tool_call>',
        ("Let me see.", [("f", '{"a": "x}\\"{"}'), ("g", '{"b": 1}')]),
    ),
    (HERMES, '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', ("", [("unheard_of", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": 2]}}</tool_call>',
        ("", [("f", '{"a": [1, {"b": 2}]}')]),
    ),
    (HERMES, "Use <tool_call> for calls, a < b.  \n", ("Use <tool_call> for calls, a < b.  \n", [])),
    (HERMES, '<tool_call>{"nam": 1}</tool_call>', ('<tool_call>{"nam": 1}</tool_call>', [])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>',
        ("", [("f", '{"a": x}')]),
    ),
    (HERMES, '<tool_call>{"x": 1}<tool_call>{"name": "g"}', ('<tool_call>{"x": 1}', [("g", "{}")])),
    (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]</tool_call>\nDone.',
        ("\nDone.", [("f", '{"a": "]"}'), ("g", "{}")]),
    ),
    (HERMES, '<tool_call>\n[ {"name": "g"}', ("", [("g", "{}")])),
    (HERMES, "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
    (HERMES, "<tool_call>[]</tool_call>", ("<tool_call>[]</tool_call>", [])),
    (
        LLAMA,
        '{"name": "f", "parameters": {"a": [1, 2]}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"a": [1, 2]}'), ("g", "{}")]),
    ),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (LLAMA, '{"name": "nobody", "parameters": {"a": 1}}', ('{"name": "nobody", "parameters": {"a": 1}}', [])),
    (LLAMA, '{"answer": 42}', ('{"answer": 42}', [])),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', ('It is {"name": "f", "parameters": {}}', [])),
    (LLAMA, "<b> 1 </b>", ("<b> 1 </b>", [])),
    (
        PLAIN,
        '[{"name": "f", "arguments": {"é": "ü"}}, {"name": "g", "arguments": "{\\"b\\": 2}"}]',
        ("", [("f", '{"é": "ü"}'), ("g", '{"b": 2}')]),
    ),
    (PLAIN, '{"function": {"name": "f", "arguments": {}}, "type": "function"}', ("", [("f", "{}")])),
    (PLAIN, "[1, 2]", ("[1, 2]", [])),
    (PLAIN, '{"name": "f", "arguments": 3}', ('{"name": "f", "arguments": 3}', [])),
    (
        LISTS,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (LISTS, "[TOOL_CALLS] none, really", ("[TOOL_CALLS] none, really", [])),
    (
        ARGS,
        'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ("Hm.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        CODER,
        'Let me see.\n<tool_call>\n<function=f>\n<parameter=a>\nx\n\n"</b>\n\n</parameter>\n'
        "<parameter=b>1</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ("Let me see.", [("f", '{"a": "x\\n\\n\\"</b>\\n", "b": "1"}'), ("g", "{}")]),
    ),
    (CODER, "<tool_call><function=unheard_of></function></tool_call>", ("", [("unheard_of", "{}")])),
    (CODER, "<function=g>\n</function>\n</tool_call> <function=h>", (" <function=h>", [("g", "{}")])),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\n\n</parameter>", ("", [("f", '{"a": ""}')])),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\nx\n", ("", [("f", '{"a": "x\\n')])),
    (
        CODER,
        "<tool_call>\n<function=f>\n<parameter=a>\n<function=g>\n</function>\n<parameter=b>\n2\n</function>\n</tool_call>!",
        ("!", [("f", '{"a": "<function=g>\\n</function>", "b": "2"}')]),
    ),
    (CODER, "Use <tool_call> or <function=>, a < b.  \n", ("Use <tool_call> or <function=>, a < b.  \n", [])),
    (CODER, '<tool_call>{"name": "f"}</tool_call>', ('<tool_call>{"name": "f"}</tool_call>', [])),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"a": x}', ("", [("f", '{"a": x}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments":\n{"a": "b\nc\td\\n"}}', ("", [("f", '{"a": "b\\nc\\td\\n"}')])),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"a":\n"b\n"}', ("", [("f", '{"a":\n"b\\n"}')])),
    (LLAMA, '{"parameters": "{\\"a\\": \\"b\nc\\"}", "name": "f"}', ("", [("f", '{"a": "b\\nc"}')])),
    (PLAIN, '{"arguments": {"a": "\\ud800"}, "name": "f"}', ("", [("f", '{"a": "\\ud800"}')])),
    (PLAIN, '{"name": "\\ud800", "arguments": {}}', ('{"name": "\\ud800", "arguments": {}}', [])),
    (
        LISTS,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": NaN}}]',
        ("", [("f", '{"a": NaN}')]),
    ),
    # Shapes of public bug reports.
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', ("", [("f", "{}")])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": [{"b": 1}]}}</tool_call>',
        ("", [("f", '{"a": [{"b": 1}]}')]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "mkdir {b,c}; echo </tool_call> <tool_call>"}}</tool_call>\nok',
        ("\nok", [("f", '{"a": "mkdir {b,c}; echo </tool_call> <tool_call>"}')]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9\\ud83d\\ude00"}, "id": "x"}</tool_call>',
        ("", [("f", '{"a": "\\u00e9\\ud83d\\ude00"}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (HERMES, '<tool_call>{"name": "g"}</tool_call></tool_call>}\n</tool_call>', ("", [("g", "{}")])),
    (HERMES, "<tool_call><function=f></function></tool_call>", ("<tool_call><function=f></function></tool_call>", [])),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"a": ";}"}}<|python_tag|>{"name": "g", "parameters": {}}',
        ("", [("f", '{"a": ";}"}'), ("g", "{}")]),
    ),
    (LLAMA, '{"name": "f", "parameters": {}}\n{"name": "g"} Done.', (" Done.", [("f", "{}"), ("g", "{}")])),
    (LLAMA, '<|python_tag|>f.call(query="x")', ('<|python_tag|>f.call(query="x")', [])),
    (PLAIN, '```\n[{"name": "f", "arguments": {}}]\n```\nso', ("\nso", [("f", "{}")])),
    (LISTS, '[TOOL_CALLS]{"name": "f", "arguments": {"a": "]"}}', ("", [("f", '{"a": "]"}')])),
    (LISTS, '[TOOL_CALLS]{"x": 1}', ('[TOOL_CALLS]{"x": 1}', [])),
    (ARGS, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g-h{}\nso', ("\nso", [("f", '{"a": 1}'), ("g-h", "{}")])),
    (ARGS, "[TOOL_CALLS]see {x}", ("[TOOL_CALLS]see {x}", [])),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}\n\nHm.', ("\n\nHm.", [("f", '{"a": "[TOOL_CALLS]"}')])),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"a": "x', ("", [("f", '{"a": "x')])),
]


def read(
    format: ToolFormat, pieces: list[str], tools: Sequence[OfferedTool] = OFFERED
) -> tuple[Found, list[OutputEvent]]:
    parser, collected = format.parser(tools), Collected()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    collected.take(events)
    return (collected.content, [(call.name, call.arguments) for call in collected.calls]), events


@pytest.mark.parametrize(("format", "text", "found"), ANSWERS)
def test_calls_are_parsed_and_all_other_text_is_content(format: ToolFormat, text: str, found: Found) -> None:
    assert read(format, [text])[0] == found


@settings(max_examples=400, deadline=None)
@given(answer=st.sampled_from(ANSWERS), random=st.randoms(use_true_random=False))
def test_events_do_not_depend_on_how_the_text_is_split(answer: tuple[ToolFormat, str, Found], random: Any) -> None:
    format, text, found = answer
    pieces = []
    while text:
        size = random.randint(1, min(len(text), 6))
        pieces.append(text[:size])
        text = text[size:]
    assert read(format, pieces)[0] == found


TAGS = ["<function=", "<parameter=", "f>", "</function>", "</parameter>"]


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from([HERMES, LLAMA, PLAIN, LISTS, ARGS, CODER]),
    text=st.lists(
        st.sampled_from(
            [*'{}[]",:; \nf', '"name": "f"', '"arguments": {', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", *TAGS]
        ),
        max_size=25,
    ).map("".join),
)
def test_no_text_breaks_a_parser_and_all_text_outside_calls_is_content(format: ToolFormat, text: str) -> None:
    (content, calls), events = read(format, list(text))
    assert (content, calls) == read(format, [text])[0]
    if not any(isinstance(event, CallBegun) for event in events):
        assert content == text


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('a"\\\n\t\r\0é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\\n\x1f'), inner, max_size=3),
    max_leaves=8,
)
RAW = {"n": "\n", "t": "\t", "r": "\r"}
WRAPPINGS = [
    (HERMES, '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'),
    (HERMES, '<tool_call>{{"arguments": {}, "name": "f"}}</tool_call>'),
    (LLAMA, '{{"name": "f", "parameters": {}}}'),
    (PLAIN, '[{{"name": "f", "arguments": {}}}]'),
    (LISTS, '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]'),
    (ARGS, "[TOOL_CALLS]f[ARGS]{}"),
]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    wrapping=st.sampled_from(WRAPPINGS),
    arguments=st.dictionaries(st.text('a"\\\n'), JSON_VALUES, min_size=1, max_size=3),
    raw=st.sets(st.sampled_from([*RAW])),
)
def test_arguments_are_valid_json_despite_missing_escapes(
    wrapping: tuple[ToolFormat, str], arguments: dict[str, Any], raw: set[str]
) -> None:
    """Write control characters in strings unescaped, each kind always or never."""
    format, around = wrapping
    written = json.dumps(arguments, ensure_ascii=False, indent=1)
    written = re.sub(r"\\(.)", lambda escape: RAW[escape[1]] if escape[1] in raw else escape[0], written)
    for pieces in ([around.format(written)], list(around.format(written))):
        (content, calls), _ = read(format, pieces)
        assert content == ""
        assert [name for name, _ in calls] == ["f"]
        assert json.loads(calls[0][1]) == arguments


def test_a_calls_name_comes_first_and_its_arguments_are_streamed() -> None:
    _, events = read(HERMES, list('<tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>'))
    assert events[0] == CallBegun(0, "f")
    assert events[1:] == [CallArguments(0, character) for character in '{"a": 12}']


def test_a_call_whose_arguments_are_not_json_stays_a_call_because_it_may_have_been_streamed() -> None:
    assert read(HERMES, ['<tool_call>{"name": "f", "arguments": {x}}'])[0] == ("", [("f", "{x}")])


@pytest.mark.parametrize(
    ("template", "special", "name"),
    [
        ("{% for tool in tools %}{% endfor %}<tool_call>\n<function=example_function_name>", (), "Qwen3Coder"),
        ("{% for tool in tools %}{% endfor %}<tool_call>", (), "Hermes"),
        (None, ("[TOOL_CALLS]",), "Mistral"),
        ("{{ messages }}", ("[TOOL_CALLS]", "[ARGS]"), "MistralArguments"),
        ("{{ messages }}", ("<|python_tag|>",), "Llama3Json"),
        ("{{ messages }}", (), "PlainJson"),
    ],
)
def test_the_format_follows_from_template_and_vocabulary(
    template: str | None, special: tuple[str, ...], name: str
) -> None:
    tokenizer = byte_tokenizer(ChatTemplate(template, {}) if template else None, *special)
    assert type(choose_format("auto", tokenizer)).__name__ == name


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_flag_overrides_the_detected_format(name: str) -> None:
    chosen = choose_format(name, byte_tokenizer(ChatTemplate("<tool_call>", {})))
    assert type(chosen).__name__.lower() == {"json": "plainjson"}.get(name, name.replace("_", ""))


def test_markers_that_are_special_tokens_are_shown_to_the_parser() -> None:
    tokenizer = byte_tokenizer(None, "[TOOL_CALLS]", "[INST]")
    assert tokenizer.added_ids_of(LISTS.marks) == {tokenizer.backend.token_to_id("[TOOL_CALLS]")}


TOOLS = [
    OfferedTool(
        "f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    ),
    OfferedTool('g"', {"type": "object", "properties": {}, "additionalProperties": False}),
]


@pytest.mark.parametrize(
    ("format", "special", "written", "refused"),
    [
        (
            HERMES,
            (),
            '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>',
            '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
        ),
        (
            HERMES,
            ("<tool_call>", "</tool_call>"),
            '<tool_call>\n{"name": "g\\"", "arguments": {}}\n</tool_call>',
            "Hello",
        ),
        (LLAMA, ("<|python_tag|>",), '{"name": "f", "parameters": {"a":1}}', '{"name": "f", "parameters": {"a":"x"}}'),
        (PLAIN, (), '{"name": "f", "arguments": {}}; {"name": "f", "arguments": {}}', "{}"),
        (LISTS, ("[TOOL_CALLS]",), '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "[TOOL_CALLS] []"),
        (ARGS, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]f[ARGS]{"a":1}', "[TOOL_CALLS]h[ARGS]{}"),
        (
            CODER,
            ("<tool_call>",),
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_a_required_call_names_an_offered_tool_and_satisfies_its_schema(
    format: ToolFormat, special: tuple[str, ...], written: str, refused: str
) -> None:
    tokenizer = byte_tokenizer(None, *special)
    grammar = call_grammar(format, TOOLS, tokenizer, most_calls=None)
    GrammarChecker(tokenizer).check(grammar)
    assert matches(grammar, tokenizer, written)
    assert not matches(grammar, tokenizer, refused)
    # The parser finds a call in text that the grammar enforced.
    assert read(format, [written])[0][1]


def test_at_most_one_call_is_enforced() -> None:
    tokenizer, twice = byte_tokenizer(None), '{"name": "f", "arguments": {}}; {"name": "f", "arguments": {}}'
    assert not matches(call_grammar(PLAIN, TOOLS, tokenizer, most_calls=1), tokenizer, twice)


def test_a_grammar_can_allow_calls_or_a_structured_answer() -> None:
    tokenizer = byte_tokenizer(None)
    answer = Grammar(kind="json_schema", text='{"type": "object", "required": ["city"], "additionalProperties": false, '
                     '"properties": {"city": {"type": "string"}}}')  # fmt: skip
    grammar = call_grammar(HERMES, TOOLS, tokenizer, most_calls=None, answer=answer)
    assert matches(grammar, tokenizer, '{"city":"Bern"}')
    assert matches(grammar, tokenizer, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not matches(grammar, tokenizer, '{"town":"Bern"}')


def test_a_model_without_tools_in_its_template_gets_them_as_system_text() -> None:
    told = describe_tools(PLAIN, [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    assert json.dumps({"name": "f", "parameters": {"type": "object"}}) in told
    assert PLAIN.example in told
