"""Prompts equal transformers' rendering of messages in the form that each template was written for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.template_shapes import SHAPES, Shape, source_of
from fastgen.server.openai.fields.messages import ChatMessage, Tool
from fastgen.text.chat_template import ChatTemplate, ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "description": "List & <show> files \u00e9",
            "parameters": {"required": ["command"], "type": "object", "properties": {"command": {"type": "string"}}},
            "name": "exec",
        },
        "type": "function",
    }
]


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call(number: int, arguments: str = '{"command":"ls \u00e9 <&>", "n": [1, null]}') -> dict[str, Any]:
    function = {"name": "exec", "arguments": arguments}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def answer(number: int, content: Any = "f.txt") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "exec", "content": content}


USER = {"role": "user", "content": " Run ls\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
DONE = {"role": "assistant", "content": "It has f.txt."}
# In OpenAI's form.
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, DONE, USER],
    "system": [SYSTEM, USER],
    "empty strings": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "empty answer": [USER, {"role": "assistant", "content": ""}, USER],
    "user parts": [{"role": "user", "content": [part("Hello"), part("world")]}],
    "one part": [{"role": "user", "content": [part(" Hello ")]}, DONE, USER],
    "system part": [{"role": "system", "content": [part("Be brief.")]}, USER],
    "assistant part": [USER, {"role": "assistant", "content": [part("Hi.")]}, USER],
    "call, null content": [USER, {"role": "assistant", "content": None, "tool_calls": [call(1)]}, answer(1)],
    "call, no content": [USER, {"role": "assistant", "tool_calls": [call(1)]}, answer(1), DONE, USER],
    "call, empty content": [USER, {"role": "assistant", "content": "", "tool_calls": [call(1)]}, answer(1)],
    "call, empty parts": [USER, {"role": "assistant", "content": [], "tool_calls": [call(1)]}, answer(1)],
    "call, text": [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call(1)]}, answer(1)],
    "call without arguments": [USER, {"role": "assistant", "content": None, "tool_calls": [call(1, "")]}, answer(1)],
    "two calls": [USER, {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}, answer(1), answer(2)],
    "result of parts": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(1)]},
        answer(1, [part("a.txt"), part("b.txt")]),
    ],
    "call, parts": [USER, {"role": "assistant", "content": [part("I look.")], "tool_calls": [call(1)]}, answer(1)],
    "list of no calls": [USER, {**DONE, "tool_calls": []}, USER],
    "null calls": [USER, {**DONE, "tool_calls": None, "refusal": None, "audio": None}, USER],
    "calls in two turns": [
        *(USER, {"role": "assistant", "content": None, "tool_calls": [call(1)]}, answer(1), DONE, USER),
        *({"role": "assistant", "content": "Again.", "tool_calls": [call(2)]}, answer(2)),
    ],
    "unnamed result": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(1, '{"a": "\\u00e9\\n{}", "b": true, "c": {}}')]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "f"},
    ],
    "marks in text": [{"role": "user", "content": "{{ x }} {% raw %} <think>a</think> \u2028 \\n"}, DONE, USER],
    "reasoning": [USER, {**DONE, "reasoning_content": "Listing."}, USER],
    "reasoning and call": [
        USER,
        {"role": "assistant", "content": None, "reasoning": "Listing.", "tool_calls": [call(1)]},
        answer(1),
    ],
}


def expected_form(message: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a message as the author of the template would pass it to transformers."""
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    form = {name: value for name, value in message.items() if value is not None and value != []}
    if isinstance(content, list) and role not in shape.parts:
        content = "\n".join(item["text"] for item in content)
    if calls:
        if not content:
            content = None if shape.null and (message.get("content") is None or not shape.empty) else ""
        form["tool_calls"] = [
            {**one, "function": {**one["function"], "arguments": expected_arguments(one["function"], shape)}}
            for one in calls
        ]
    elif isinstance(content, str) and role not in shape.strings:
        content = [part(content)]
    if calls and content and role not in shape.strings and isinstance(content, str):
        content = [part(content)]
    if "reasoning" in form:
        form["reasoning_content"] = form["reasoning"]
    return {**form, "content": content}


def expected_arguments(function: dict[str, Any], shape: Shape) -> Any:
    text = function["arguments"] or "{}"
    return json.loads(text) if shape.arguments == "object" else text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize(
    ("shape", "with_tools"),
    [(name, with_tools) for name, shape in SHAPES.items() for with_tools in (False, True)[: 1 + shape.tools]],
)
def test_prompts_equal_those_of_transformers(shape: str, conversation: str, with_tools: bool) -> None:
    given, messages = SHAPES[shape], CONVERSATIONS[conversation]
    tools = TOOLS if with_tools else None
    expected: str | None
    try:
        (expected,), _ = render_jinja_template(
            [[expected_form(message, given) for message in messages]],
            chat_template=source_of(shape),
            add_generation_prompt=True,
            tools=tools,
            **SPECIAL,
        )
    except Exception:  # the template rejects this conversation
        expected = None
    ours = ChatTemplate(source_of(shape), SPECIAL)
    received = [ChatMessage.model_validate(message).for_template() for message in messages]
    described = [Tool.model_validate(tool).for_template() for tool in tools or []]
    try:
        rendered = ours.render(received, tools=described)
    except ChatTemplateError:
        assert expected is None
    else:
        assert rendered == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_no_earlier_call_is_lost_and_no_none_is_printed(shape: str) -> None:
    """Shapes without calls at least say nothing that the client has not said."""
    template = ChatTemplate(source_of(shape), SPECIAL)
    shows_calls = "call.function" in source_of(shape) or "tool['function']" in source_of(shape)
    for content in (None, "", []):
        messages = [USER, {"role": "assistant", "content": content, "tool_calls": [call(1)]}]
        try:
            shown = template.render([ChatMessage.model_validate(message).for_template() for message in messages])
        except ChatTemplateError:
            continue
        assert "None" not in shown
        if shows_calls:
            assert shown.count("exec") == 1
            assert "'command'" not in shown, "Python's spelling of an object"
            assert '\\"command' not in shown, "JSON escaped twice"


def test_arguments_that_are_not_json_are_rendered_as_the_model_wrote_them() -> None:
    template = ChatTemplate(source_of("hermes"), SPECIAL)
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call(1, '{"a": x')]}]
    assert '"arguments": "{\\"a\\": x"' in template.render(messages)


def test_half_of_a_character_in_arguments_becomes_text_that_tokenizers_take() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}", {})
    for escaped, shown in (
        (r"a\ud800", "a\ufffd"),
        (r"\uDC00b", "\ufffdb"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\\ud800", r"\\ud800"),
    ):
        messages = [{"role": "assistant", "content": None, "tool_calls": [call(1, f'{{"a": "{escaped}"}}')]}]
        assert template.render(messages) == f'{{"a": "{shown}"}}'


def test_arguments_of_a_client_that_sends_an_object_become_json_where_the_template_copies_them() -> None:
    template = ChatTemplate(source_of("glm_4"), SPECIAL)
    function = {"name": "f", "arguments": {"\u00e9": 1}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]}]
    assert template.render(messages).endswith('f\n{"\u00e9": 1}<|assistant|>')


def test_a_template_that_needs_a_system_message_first_is_read_from_its_source() -> None:
    parts = "{% for p in message.content %}[{{ p.text }}]{% endfor %}"
    text = "{{ message.content }}"
    for shown, expected in ((parts, "[Hello][world]"), (text, "Hello\nworld")):
        strict = (
            "{% if messages[0].content != 'Rules.' %}{{ raise_exception('the rules come first') }}{% endif %}"
            f"{{% for message in messages[1:] %}}{shown}{{% endfor %}}"
        )
        messages = [
            {"role": "system", "content": "Rules."},
            {"role": "user", "content": [part("Hello"), part("world")]},
        ]
        assert ChatTemplate(strict, {}).render(messages) == expected


def test_a_message_of_parts_is_continued_behind_its_last_part() -> None:
    source = source_of("parts_in_a_variable")
    messages = [USER, {"role": "assistant", "content": [part("One"), part("two, ")]}]
    assert ChatTemplate(source, {}).render_unfinished(messages).endswith("assistant:[One][two, ")
    messages = [USER, {"role": "assistant", "content": [part("One"), part("two, ")]}]
    chatml = source_of("chatml_printed")
    assert ChatTemplate(chatml, {}).render_unfinished(messages).endswith("assistant\nOne\ntwo, ")


def test_documents_get_the_template_named_rag() -> None:
    sources = {"default": "plain", "rag": "{{ documents[0].text }}", "tool_use": "{{ tools[0].function.name }}"}
    template = ChatTemplate.named(sources, {})
    assert template is not None
    assert template.render([USER]) == "plain"
    assert template.render([USER], documents=[{"title": "t", "text": "the text"}]) == "the text"
    assert template.render([USER], tools=TOOLS, documents=[{"text": "the text"}]) == "exec"
    only_tools = ChatTemplate.named({"tool_use": "{{ tools[0].function.name }}"}, {})
    assert only_tools is not None
    assert only_tools.render([USER], tools=TOOLS) == "exec"


def test_tools_are_rendered_with_the_fields_that_the_client_sent_in_its_order() -> None:
    template = ChatTemplate("{{ tools | tojson }}", {})
    described = [Tool.model_validate(tool).for_template() for tool in TOOLS]
    assert template.render([USER], tools=described) == json.dumps(TOOLS, ensure_ascii=False)


def test_probes_are_rendered_once_and_only_for_roles_that_occur() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    form = template._template._form
    seen: list[Any] = []
    tried = form._trial
    form._trial = lambda messages, tools: (seen.append(messages), tried(messages, tools))[1]
    for _ in range(3):
        template.render([USER, DONE, USER])
    assert len(seen) == 4
