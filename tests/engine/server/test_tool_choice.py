"""The grammar that `tool_choice` imposes on the output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.text.matching import byte_tokenizer, matches
from fastgen.core.request import RequestError
from fastgen.server.openai.chat import render
from fastgen.server.openai.protocol import ChatRequest
from fastgen.server.openai.tool_calling import ToolUse
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.text.chat import ChatTemplate
from fastgen.text.tools.events import Collected
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.qwen3_coder import Qwen3Coder

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
TOKENIZER = byte_tokenizer(None)
FORMATS = {
    Hermes(): '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>',
    Qwen3Coder(): "<tool_call>\n<function={}>\n</function>\n</tool_call>",
}


def use_of(format: Any, **fields: Any) -> tuple[ToolUse, ServedModel]:
    """Return the ToolUse of a request with these fields, for a model with this tool-call format."""
    model = cast(ServedModel, SimpleNamespace(tokenizer=TOKENIZER, tool_format=format))
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields}
    use = ToolUse.of(ChatRequest.model_validate(body), model)
    assert use is not None
    return use, model


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}{% endfor %}"
)
TOOLS_OF_MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.get('tools', '') }}{% endfor %}"
OWN_WAY = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def model_with(template: str) -> ServedModel:
    tokenizer = byte_tokenizer(ChatTemplate(template, {}))
    return cast(ServedModel, SimpleNamespace(tokenizer=tokenizer, tool_format=Hermes()))


@pytest.mark.parametrize(
    ("template", "told_in"),
    [(NO_SYSTEM, "<turn>user"), (TOOLS_OF_MESSAGES, "<system>"), (OWN_WAY, "[{")],
    ids=["no-system", "tools-of-messages", "tools"],
)
def test_every_kind_of_template_renders_the_tools(template: str, told_in: str) -> None:
    model = cast(
        ServedModel, SimpleNamespace(tokenizer=byte_tokenizer(ChatTemplate(template, {})), tool_format=Hermes())
    )
    question = {"role": "user", "content": "Weather in Bern?"}
    body = ChatRequest.model_validate({"messages": [question], "tools": TOOLS})
    text = render(body, model, ToolUse.of(body, model))
    assert text.startswith(told_in)
    assert '"name": "f"' in text or "'name': 'f'" in text
    assert text.endswith("Weather in Bern?")


def test_a_template_error_is_reported_with_tools_too() -> None:
    model = cast(
        ServedModel, SimpleNamespace(tokenizer=byte_tokenizer(ChatTemplate(NO_SYSTEM, {})), tool_format=Hermes())
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS})
    with pytest.raises(RequestError, match="System role not supported"):
        render(body, model, ToolUse.of(body, model))


@pytest.mark.parametrize(("format", "call"), FORMATS.items(), ids=[format.name for format in FORMATS])
@pytest.mark.parametrize(
    ("fields", "may_be_called", "several"),
    [
        ({"tool_choice": "required"}, "fg", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "fg", False),
        ({"tool_choice": named("f")}, "f", False),
        ({"tool_choice": named("g")}, "g", False),
        ({"tool_choice": named("g"), "parallel_tool_calls": True}, "g", False),
    ],
)
def test_a_tool_choice_allows_only_the_calls_that_it_names(
    format: Any, call: str, fields: dict[str, Any], may_be_called: str, several: bool
) -> None:
    use, model = use_of(format, **fields)
    found = use.grammar(model, None)
    assert found is not None
    grammar, _ = found
    assert "".join(name for name in "fgh" if matches(grammar, TOKENIZER, call.format(name))) == may_be_called
    once = call.format(may_be_called[0])
    assert matches(grammar, TOKENIZER, f"{once}\n{once}") == several
    assert not matches(grammar, TOKENIZER, "No, thanks.")


def test_a_named_function_must_be_in_tools() -> None:
    with pytest.raises(RequestError, match="'h' is not a function in tools"):
        use_of(Hermes(), tool_choice=named("h"))


def test_the_parser_uses_the_schemas_of_the_offered_tools() -> None:
    count = {"type": "object", "properties": {"count": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": count}}
    use, _ = use_of(Qwen3Coder(), tools=[tool])
    found, parser = Collected(), use.parser()
    found.take(parser.push("<tool_call>\n<function=f>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"))
    found.take(parser.finish())
    assert [call.arguments for call in found.calls] == ['{"count": 3}']
