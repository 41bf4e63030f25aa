"""The grammar that `tool_choice` imposes on the output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken

from engine.text.matching import END, byte_tokenizer, matches
from fastgen.core.request_error import RequestError
from fastgen.server.openai.chat.rendering import chat_prompt
from fastgen.server.openai.chat.tools import Structure, Tools, constrained, offered_tools, tools_grammar
from fastgen.server.openai.fields.messages import ToolChoice
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.responses.request import ResponseRequest
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.chat_template import ChatTemplate
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.output_events import Collected
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.think import Think
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.plain_json import Llama3Json, PlainJson
from fastgen.text.tools.qwen3_coder import Qwen3Coder
from fastgen.text.vocabulary import Vocabulary

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
TOKENIZER = byte_tokenizer(None)
FORMATS = {
    Hermes(): '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>',
    Qwen3Coder(): "<tool_call>\n<function={}>\n</function>\n</tool_call>",
}


def tools_of(
    format: Any, *, tokenizer: Tokenizer = TOKENIZER, excluded: tuple[str, ...] = (), **fields: Any
) -> tuple[Tools, Structure | None]:
    """Return the tools of a request with these fields and the grammar of its output."""
    model = cast(ServedModel, SimpleNamespace(tokenizer=tokenizer, tool_format=format, control=None))
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields})
    tools = offered_tools(body, model)
    return tools, tools_grammar(tools, model, body.max_calls, None, excluded)


def collected(format: Any, tools: Tools, text: str) -> Collected:
    parser = format.parser(tools)
    return Collected([*parser.push(text), *parser.finish()])


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}{% endfor %}"
)
TOOLS_OF_MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.get('tools', '') }}{% endfor %}"
OWN_WAY = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def model_with(template: str) -> ServedModel:
    tokenizer = byte_tokenizer(ChatTemplate(template, {}))
    return cast(ServedModel, SimpleNamespace(tokenizer=tokenizer, tool_format=Hermes(), control=None))


@pytest.mark.parametrize(
    ("template", "told_in"),
    [(NO_SYSTEM, "<turn>user"), (TOOLS_OF_MESSAGES, "<system>"), (OWN_WAY, "[{")],
    ids=["no-system", "tools-of-messages", "tools"],
)
def test_every_kind_of_template_renders_the_tools(template: str, told_in: str) -> None:
    model = cast(
        ServedModel,
        SimpleNamespace(tokenizer=byte_tokenizer(ChatTemplate(template, {})), tool_format=Hermes(), control=None),
    )
    question = {"role": "user", "content": "Weather in Bern?"}
    body = ChatRequest.model_validate({"messages": [question], "tools": TOOLS})
    text = chat_prompt(body, model, offered_tools(body, model))
    assert text.startswith(told_in)
    assert '"name": "f"' in text or "'name': 'f'" in text
    assert text.endswith("Weather in Bern?")


def test_a_template_error_is_reported_with_tools_too() -> None:
    model = cast(
        ServedModel,
        SimpleNamespace(tokenizer=byte_tokenizer(ChatTemplate(NO_SYSTEM, {})), tool_format=Hermes(), control=None),
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS})
    with pytest.raises(RequestError, match="System role not supported"):
        chat_prompt(body, model, offered_tools(body, model))


@pytest.mark.parametrize(("format", "call"), FORMATS.items(), ids=[type(format).__name__ for format in FORMATS])
@pytest.mark.parametrize(
    ("fields", "may_be_called", "several"),
    [
        ({"tool_choice": "required"}, "fg", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "fg", False),
        ({"tool_choice": named("f")}, "f", False),
        ({"tool_choice": named("g")}, "g", False),
        ({"tool_choice": named("g"), "parallel_tool_calls": True}, "g", False),
        ({"tool_choice": allowed("required", "f", "g")}, "fg", True),
        ({"tool_choice": allowed("required", "g")}, "g", True),
        ({"tool_choice": allowed("required", "g"), "parallel_tool_calls": False}, "g", False),
    ],
)
def test_a_tool_choice_allows_only_the_calls_that_it_names(
    format: Any, call: str, fields: dict[str, Any], may_be_called: str, several: bool
) -> None:
    _, found = tools_of(format, **fields)
    assert found is not None
    grammar, _ = found
    assert "".join(name for name in "fgh" if matches(grammar, TOKENIZER, call.format(name))) == may_be_called
    once = call.format(may_be_called[0])
    assert matches(grammar, TOKENIZER, f"{once}\n{once}") == several
    assert not matches(grammar, TOKENIZER, "No, thanks.")


@pytest.mark.parametrize("choice", [named("h"), allowed("auto", "f", "h"), allowed("required", "h", "f")])
def test_a_named_function_must_be_in_tools(choice: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="'h' is not a function in tools"):
        tools_of(Hermes(), tool_choice=choice)


@pytest.mark.parametrize(("format", "call"), FORMATS.items(), ids=[type(format).__name__ for format in FORMATS])
def test_of_allowed_tools_the_model_may_call_some_or_none(format: Any, call: str) -> None:
    tools, found = tools_of(format, tool_choice=allowed("auto", "g"))
    assert [(tool.name, tool.required) for tool in tools] == [("g", False)]
    assert found is not None
    grammar, _ = found
    assert matches(grammar, TOKENIZER, "No, thanks.")
    assert matches(grammar, TOKENIZER, f"I look. {call.format('g')}")
    assert not matches(grammar, TOKENIZER, call.format("f"))


@pytest.mark.parametrize("format", [PlainJson(), Llama3Json()], ids=["json", "llama3_json"])
def test_without_a_mark_of_calls_a_call_that_is_not_allowed_is_content(format: Any) -> None:
    """As a grammar of calls would forbid answers in JSON."""
    tools, found = tools_of(format, tool_choice=allowed("auto", "g"))
    assert found is None
    said = '{"name": "f", "parameters": {}, "arguments": {}}'
    assert collected(format, tools, said).content == said
    assert len(collected(format, tools, said.replace('"f"', '"g"')).calls) == 1


def test_the_prompt_describes_the_tools_that_are_not_allowed_too() -> None:
    """So that the prompt is the same, and cached, whatever the choice."""
    model, prompts = model_with(OWN_WAY), set()
    for choice in ("auto", allowed("auto", "f"), allowed("required", "g")):
        body = ChatRequest.model_validate(
            {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": choice}
        )
        prompts.add(chat_prompt(body, model, offered_tools(body, model)))
    assert len(prompts) == 1


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (allowed("none", "f"), "allowed_tools must be"),
        (allowed("auto"), "allowed_tools has no tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named("f")]}, "allowed_tools must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}}, "each allowed tool"),
        ({"type": "custom", "custom": {"name": "f"}}, 'must be "none", "auto", "required"'),
    ],
)
def test_a_malformed_tool_choice_is_rejected_with_the_right_form(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        tools_of(Hermes(), tool_choice=choice)


def test_responses_write_allowed_tools_without_nesting() -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    body = ResponseRequest.model_validate({"input": "a", "tools": tools, "tool_choice": choice})
    assert body.tool_choice == choice, "the response repeats it"
    assert body.chat().tool_choice == ToolChoice("required", ("g",))
    assert body.chat().max_calls is None
    for wrong in ({**choice, "tools": [named("g")]}, {**choice, "mode": "none"}):
        with pytest.raises(ValidationError, match="allowed"):
            ResponseRequest.model_validate({"input": "a", "tools": tools, "tool_choice": wrong})
    with pytest.raises(RequestError, match="allowed_tools has no tools"):
        ResponseRequest.model_validate({"input": "a", "tools": tools, "tool_choice": {**choice, "tools": []}}).chat()


def test_the_parser_uses_the_schemas_of_the_offered_tools() -> None:
    count = {"type": "object", "properties": {"count": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": count}}
    tools, _ = tools_of(Qwen3Coder(), tools=[tool])
    text = "<tool_call>\n<function=f>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
    found = collected(Qwen3Coder(), tools, text)
    assert [call.arguments for call in found.calls] == ['{"count": 3}']


COUNT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT = [
    {"type": "function", "function": {"name": "f", "parameters": COUNT, "strict": True}},
    {"type": "function", "function": {"name": "g", "parameters": COUNT}},
]
# Of each format: its special tokens, a call of a function with an argument, and the text between two calls.
CALLS: list[tuple[Any, tuple[str, ...], str, str]] = [
    (Hermes(), (), '<tool_call>\n{{"name": "{}", "arguments": {{"a": {}}}}}\n</tool_call>', "\n"),
    (
        Hermes(),
        ("<tool_call>", "</tool_call>"),
        '<tool_call>\n{{"name": "{}", "arguments": {{"a": {}}}}}\n</tool_call>',
        "\n",
    ),
    (
        Qwen3Coder(),
        (),
        "<tool_call>\n<function={}>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
    (Mistral(), ("[TOOL_CALLS]",), '[TOOL_CALLS] [{{"name": "{}", "arguments": {{"a": {}}}}}]', ""),
    (MistralArguments(), ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]{}[ARGS]{{"a": {}}}', ""),
]


@pytest.mark.parametrize(("format", "special", "call", "between"), CALLS)
def test_a_strict_function_is_called_by_its_schema_while_calls_are_optional(
    format: Any, special: tuple[str, ...], call: str, between: str
) -> None:
    tokenizer = byte_tokenizer(None, *special)
    tools, found = tools_of(format, tools=STRICT, tokenizer=tokenizer)
    assert found is not None
    assert found[1] == "tools"
    allowed, wrong = call.format("f", 1), call.format("f", '"x"')
    for text in ("", "No call, a < b.", allowed, f"Let me see.\n{allowed}", call.format("g", '"any"')):
        assert matches(found[0], tokenizer, text), text
    for text in (wrong, f"Let me see.\n{wrong}", call.format("h", 1), f"{format.opening} is how to call"):
        assert not matches(found[0], tokenizer, text), text
    made_calls = collected(format, tools, f"Let me see.\n{allowed}").calls
    assert [(made.name, made.arguments.replace(" ", "")) for made in made_calls] == [("f", '{"a":1}')]
    _, once = tools_of(format, tools=STRICT, tokenizer=tokenizer, parallel_tool_calls=False)
    assert once is not None
    assert matches(once[0], tokenizer, allowed)
    assert not matches(once[0], tokenizer, f"{allowed}{between}{allowed}")


def test_a_bare_function_tag_is_no_way_around_a_strict_schema() -> None:
    tools, found = tools_of(Qwen3Coder(), tools=STRICT)
    assert found is not None
    bare = "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>"
    assert collected(Qwen3Coder(), tools, bare).calls, "the parser takes it for a call"
    assert not matches(found[0], TOKENIZER, bare)


def test_the_mark_of_a_call_may_be_a_token_of_its_own() -> None:
    backend = byte_tokenizer(None).backend
    backend.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer = Tokenizer(backend, Vocabulary(backend), None, None, END)
    _, found = tools_of(Hermes(), tools=STRICT, tokenizer=tokenizer)
    assert found is not None
    call = CALLS[0][2]
    assert len(tokenizer.encode("<tool_call>", add_special_tokens=False)) == 1
    assert matches(found[0], tokenizer, f"So:\n{call.format('f', 1)}")
    assert not matches(found[0], tokenizer, f"So:\n{call.format('f', 'null')}")


@pytest.mark.parametrize("start", [Start.OPEN, Start.INSIDE])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_a_model_may_think_about_any_call_before_a_strict_one(special: tuple[str, ...], start: Start) -> None:
    tokenizer, marks = byte_tokenizer(None, *special), Think()
    excluded = (marks.opening,) if start is Start.OPEN else ()
    _, found = tools_of(Hermes(), tools=STRICT, tokenizer=tokenizer, excluded=excluded)
    assert found is not None
    grammar = marks.grammar(found[0], tokenizer, start, None, offers_tools=True)
    assert grammar is not None
    call, opening = CALLS[0][2], "<think>\n" if start is Start.OPEN else ""
    good, bad = call.format("f", 1), call.format("f", "{}")
    for text in (f"{opening}Maybe {bad}?\n</think>\n\nNo.", f"{opening}{bad}</think>{good}"):
        assert matches(grammar, tokenizer, text), text
    for text in (f"{opening}Well.\n</think>\n\n{bad}", f"{opening}</think>So: {bad}"):
        assert not matches(grammar, tokenizer, text), text
    assert matches(grammar, tokenizer, good) == (start is Start.OPEN)


@pytest.mark.parametrize(
    ("format", "special", "call"),
    [
        (PlainJson(), (), '{{"name": "{}", "arguments": {{"a": {}}}}}'),
        (Llama3Json(), (), '{{"name": "{}", "parameters": {{"a": {}}}}}'),
        (Llama3Json(), ("<|python_tag|>",), '{{"name": "{}", "parameters": {{"a": {}}}}}'),
        (Llama3Json(), ("<|python_tag|>",), '<|python_tag|>{{"name": "{}", "parameters": {{"a": {}}}}}'),
    ],
)
def test_a_strict_function_of_a_format_without_a_mark_is_called_by_its_schema_or_text_is_written(
    format: Any, special: tuple[str, ...], call: str
) -> None:
    tokenizer = byte_tokenizer(None, *special)
    tools, found = tools_of(format, tools=STRICT, tokenizer=tokenizer)
    assert found is not None
    allowed, wrong = call.format("f", 1), call.format("f", '"x"')
    texts = ["", "No call: {a < b}, [1].", "\n Well", f"Like {wrong.removeprefix('<|python_tag|>')}"]
    for text in (*texts, allowed, call.format("g", '"any"'), f"{allowed}; {allowed.removeprefix('<|python_tag|>')}"):
        assert matches(found[0], tokenizer, text), text
    for text in (*texts, "<|python_tag|>print(1)"):
        assert not collected(format, tools, text).calls, "the parser takes it for text too"
    for text in (
        wrong,
        call.format("h", 1),
        f" {wrong}",
        f"\n{wrong}",
        f"```json\n{wrong}",
        f"[{wrong}]",
        "{}",
        f"<|python_tag|> {wrong}",
    ):
        assert not matches(found[0], tokenizer, text), text
    assert [(made.name, made.arguments.replace(" ", "")) for made in collected(format, tools, allowed).calls] == [
        ("f", '{"a":1}')
    ]
    _, once = tools_of(format, tools=STRICT, tokenizer=tokenizer, parallel_tool_calls=False)
    assert once is not None
    assert not matches(once[0], tokenizer, f"{allowed}; {allowed}")


def test_a_format_without_a_mark_enforces_nothing_unless_a_function_is_strict() -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": named("f")}):
        assert tools_of(PlainJson(), tools=STRICT, **fields)[1] is not None
    assert tools_of(PlainJson())[1] is None, "no function is strict"


@pytest.mark.parametrize(
    ("given", "format", "fields", "is_strict"),
    [
        ({}, Hermes(), {}, True),
        ({"strict": None}, Hermes(), {}, True),
        ({"strict": False}, Hermes(), {}, False),
        ({}, PlainJson(), {}, False),
        ({}, PlainJson(), {"tool_choice": "required"}, True),
    ],
)
def test_functions_of_responses_are_strict_by_default_where_the_format_can_enforce_it(
    given: dict[str, Any], format: Any, fields: dict[str, Any], is_strict: bool
) -> None:
    model = cast(ServedModel, SimpleNamespace(tokenizer=TOKENIZER, tool_format=format))
    tool = {"type": "function", "name": "f", "parameters": COUNT, **given}
    chat = ResponseRequest.model_validate({"input": "a", "tools": [tool], **fields}).chat()
    tools = offered_tools(chat, model)
    assert [offered.strict for offered in tools] == [is_strict]
    assert (tools_grammar(tools, model) is not None) == is_strict
    (shown,) = chat.tools or []
    assert "strict" not in shown.for_template()["function"] or given.get("strict") is False, "the prompt stays as it is"
    direct = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields})
    assert not offered_tools(direct, model)[0].strict, "chat completions have the other default"


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*x)y"}}}
BOUNDARY = {"type": "object", "properties": {"a": {"type": "string", "pattern": "\\bx"}}}
LARGE = {"type": "object", "properties": {f"property_{n}": {"type": "string"} for n in range(1500)}}


def function(name: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": parameters, **fields}


async def enforced(format: Any, **fields: Any) -> tuple[Tools, Any]:
    """Return the tools of a request to /v1/responses as far as they are enforced, and their grammar."""
    checker = GrammarChecker(TOKENIZER)
    model = cast(ServedModel, SimpleNamespace(tokenizer=TOKENIZER, tool_format=format, grammars=checker))
    body = ResponseRequest.model_validate({"input": "a", **fields}).chat()
    try:
        tools, found = await constrained(offered_tools(body, model), model, body.max_calls, None)
    finally:
        checker.close()
    return tools, found and found[0]


@pytest.mark.parametrize("odd", [UNIQUE, AHEAD, BOUNDARY, {"not": {"required": ["b"]}}])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_functions_of_responses_are_strict_by_default_only_where_their_schema_can_be_enforced(
    odd: dict[str, Any], choice: str
) -> None:
    tools = [function("odd", odd), function("f", COUNT)]
    offered, grammar = await enforced(Hermes(), tools=tools, tool_choice=choice)
    assert [tool.strict for tool in offered] == [False, True]
    call = CALLS[0][2]
    assert matches(grammar, TOKENIZER, call.format("f", 1))
    assert not matches(grammar, TOKENIZER, call.format("f", '"x"'))
    assert matches(grammar, TOKENIZER, call.format("odd", 5))


async def test_large_schemas_that_are_strict_by_default_leave_the_request_unconstrained() -> None:
    offered, grammar = await enforced(Hermes(), tools=[function(name, LARGE) for name in "abcdef"])
    assert [tool.strict for tool in offered] == [True] + [False] * 5
    assert grammar is not None


@pytest.mark.parametrize(
    ("odd", "message", "formats"),
    [
        (UNIQUE, "properties.a.uniqueItems: cannot be enforced", (Hermes(), PlainJson(), Qwen3Coder())),
        (BOUNDARY, "lookaround", (Hermes(), PlainJson())),
        ({"type": "array"}, 'type: must be "object"', (Hermes(), PlainJson())),
    ],
)
async def test_a_function_that_must_be_strict_is_refused_by_name_if_its_schema_cannot_be_enforced(
    odd: dict[str, Any], message: str, formats: tuple[Any, ...]
) -> None:
    for format in formats:
        with pytest.raises(RequestError, match=f"the parameters of odd: .*{message}") as raised:
            await enforced(format, tools=[function("f", COUNT), function("odd", odd, strict=True)])
        assert raised.value.param == "tools"


@pytest.mark.parametrize(
    "parameters",
    [{"properties": {"a": {"type": "integer"}}}, {"title": "F"}, {"$ref": "#/$defs/x", "$defs": {"x": COUNT}}],
)
async def test_arguments_are_an_object_although_the_schema_does_not_say_so(parameters: dict[str, Any]) -> None:
    _, grammar = await enforced(Hermes(), tools=[function("f", parameters)], tool_choice="required")
    call = CALLS[0][2].replace('{{"a": {}}}', "{}")
    assert matches(grammar, TOKENIZER, call.format("f", '{"a": 1}'))
    for arguments in ("[1,2]", "3", '"x"', "null"):
        assert not matches(grammar, TOKENIZER, call.format("f", arguments))
