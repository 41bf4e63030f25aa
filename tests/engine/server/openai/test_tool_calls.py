"""Tools through the server: offered to the model, called in OpenAI's format, and results passed back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
# The scripted engine ignores grammars, so it must write a required call exactly as the grammar requires.
REQUIRED = '{"name": "get_weather", "arguments": {"city":"Bern"}}'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = ("--served-model-name", "smollm2", "--tool-parser", "hermes")
    with serving(tmp_path_factory.mktemp("hermes"), *options) as server:
        server.wait_status("/ready", 200)
        yield server


def chat(server: Serving, *texts: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages_for(*texts), "tools": [WEATHER, TIME], **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_tool_call_is_returned_in_openais_format(scripted: Serving) -> None:
    choice = chat(scripted, CALL)["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}


def test_the_tool_parser_option_selects_the_format(hermes: Serving) -> None:
    choice = chat(hermes, "I shall look.\n" + tagged(CALL) + "\n" + tagged('{"name": "get_time", "arguments": {}}'))
    message = choice["choices"][0]["message"]
    assert message["content"] == "I shall look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "get_time"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("text", ["It is sunny.", '{"city": "Zürich"}', '{"name": "no_such_tool", "arguments": {}}'])
def test_output_that_is_not_a_tool_call_is_content(scripted: Serving, text: str) -> None:
    choice = chat(scripted, text)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]


def test_without_tools_nothing_is_parsed_as_a_call(scripted: Serving) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        choice = chat(scripted, CALL, **fields)["choices"][0]
        assert choice["message"]["content"] == CALL


def test_a_tool_call_is_streamed_in_deltas(hermes: Serving) -> None:
    chunks = list(
        hermes.client().chat.completions.create(
            model="smollm2",
            messages=messages_for("Wait. " + tagged(CALL) + tagged('{"name": "get_time", "arguments": {}}')),
            tools=[WEATHER, TIME],  # type: ignore[list-item]
            stream=True,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Wait."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    first = [call for call in calls if call.index == 0]
    assert first[0].id
    assert first[0].function is not None
    assert (first[0].type, first[0].function.name, first[0].function.arguments) == ("function", "get_weather", "")
    assert all(call.id is None and call.function and call.function.name is None for call in first[1:])
    # How many tokens a delta has depends on the load; test_stream_bytes has each report in a delta of its own.
    pieces = [call.function.arguments or "" for call in first if call.function]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == {"city": "Zürich"}
    assert next(call.function.name for call in calls if call.index == 1 and call.function) == "get_time"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_a_truncated_tool_call_keeps_finish_reason_length(hermes: Serving) -> None:
    choice = chat(hermes, tagged(CALL), max_tokens=22)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Zürich"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_parallel_tool_calls_false_returns_one_call(hermes: Serving) -> None:
    choice = chat(hermes, tagged(CALL) + tagged(CALL), parallel_tool_calls=False)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_required_tool_call_is_returned(scripted: Serving, tool_choice: Any) -> None:
    choice = chat(scripted, REQUIRED, tool_choice=tool_choice)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Bern"}'}


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"]
)
def test_a_required_tool_call_is_streamed_in_deltas(scripted: Serving, tool_choice: Any) -> None:
    chunks = list(
        scripted.client().chat.completions.create(
            model="smollm2",
            messages=messages_for(REQUIRED),
            tools=[WEATHER, TIME],  # type: ignore[list-item]
            tool_choice=tool_choice,
            stream=True,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert not any(delta.content for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].id
    assert {call.index for call in calls} == {0}
    functions = [call.function for call in calls if call.function]
    assert [function.name for function in functions if function.name] == ["get_weather"]
    assert len(functions) > 1
    assert "".join(function.arguments or "" for function in functions) == '{"city":"Bern"}'
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert (reasons[-1], set(reasons[:-1])) == ("tool_calls", {None})


def test_required_tools_with_an_invalid_schema_are_rejected(scripted: Serving) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}
    body = {"messages": messages_for("a"), "tools": [broken], "tool_choice": "required"}
    response = scripted.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_tools_go_into_the_system_message_if_the_template_does_not_take_them(scripted: Serving) -> None:
    """The scripted engine repeats its prompt."""
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "tools": [WEATHER],
        "ignore_eos": True,
        "max_tokens": 120,
    }
    text = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("system\nBe brief.\n\nYou can call these functions")
    assert "get_weather" in text.partition("user\n")[0]


def test_a_conversation_with_tool_calls_and_results_is_rendered(scripted: Serving) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "Weather in Bern?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "snow"}]},
        {"role": "user", "content": prompt_for("It snows.")},
    ]
    response = scripted.post("/v1/chat/completions", {"messages": messages, "tools": [WEATHER]})
    assert response.json()["choices"][0]["message"]["content"] == "It snows."


def test_continue_final_message_continues_the_last_message(scripted: Serving) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two"}]
    body = {"messages": messages, "continue_final_message": True, "ignore_eos": True, "max_tokens": 60}
    text = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    # The scripted engine starts over after the prompt.
    assert "assistant\none twosystem" in text.replace("<|im_start|>", "")


def test_add_generation_prompt_false_leaves_out_the_assistant_header(scripted: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False, "ignore_eos": True}
    text = scripted.post("/v1/chat/completions", {**body, "max_tokens": 40}).json()["choices"][0]["message"]["content"]
    assert "assistant" not in text.partition("Hi")[2].partition("system")[0]


def test_the_developer_role_is_rendered_as_system(scripted: Serving) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    body = {"messages": messages, "ignore_eos": True, "max_tokens": 30}
    text = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("system\nBe brief.\nuser\nHi\n")
