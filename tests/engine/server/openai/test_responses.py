"""/v1/responses, validated by the official client's types."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.server.scripted_prompts import prompt_for
from engine.server.serving import Serving, leaves_its_grammar
from engine.server.test_request_handler import PlayedEngine, handler_of
from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.server.http import off_loop
from fastgen.server.http.request_context import RequestContext
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.responses import endpoint
from fastgen.server.openai.responses.input_items import messages_of
from fastgen.server.openai.responses.objects import begun_response
from fastgen.server.openai.responses.output import ItemEvent, Output
from fastgen.server.openai.responses.request import ResponseRequest
from fastgen.server.serving import request_handler
from fastgen.text.request_output import OutputDelta

PATH = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]


def created(server: Serving, reply: str, **fields: Any) -> dict[str, Any]:
    """Return the response; its stream must validate and end in the same output."""
    body = {"input": prompt_for(reply), **fields}
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    complete: dict[str, Any] = response.json()
    Response.model_validate(complete, strict=True)
    streamed = streamed_events(server, body)
    assert without_ids(streamed[-1]["response"]["output"]) == without_ids(complete["output"])
    assert streamed[-1]["response"]["usage"]["output_tokens"] == complete["usage"]["output_tokens"]
    return complete


def streamed_events(server: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = server.post(PATH, {**body, "stream": True}).text.strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert type(EVENTS.validate_python(event)).model_validate(event, strict=True).type == event["type"]
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_response_has_text_and_usage(scripted: Serving) -> None:
    client = scripted.client()
    response = client.responses.create(
        model="smollm2", input=prompt_for("one two three"), instructions="Be brief.", metadata={"a": "b"}
    )
    assert response.output_text == "one two three"
    assert (response.status, response.instructions, response.metadata) == ("completed", "Be brief.", {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.id.startswith("resp_")
    created(scripted, "one two three", temperature=0, top_p=0.5, max_output_tokens=40)


def test_the_official_client_follows_a_stream(scripted: Serving) -> None:
    text = " ".join(["one two three"] * 20)  # long enough that a busy machine does not merge all of it into one event
    with scripted.client().responses.stream(model="smollm2", input=prompt_for(text)) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts) == text
    assert len(texts) > 1


def test_a_response_that_reaches_its_limit_is_incomplete(scripted: Serving) -> None:
    response = created(scripted, "one two three", max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    events = streamed_events(scripted, {"input": prompt_for("one two three"), "max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete"


def test_reasoning_and_calls_are_items(thinking: Serving) -> None:
    response = created(thinking, f"{THOUGHT}It is:\n{CALL}", tools=TOOLS, reasoning={"effort": "high"})
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "It is:"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"city": "Bern"})
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = streamed_events(thinking, {"input": prompt_for(f"{THOUGHT}{CALL}"), "tools": TOOLS})
    kinds = {event["type"].removeprefix("response.") for event in events}
    assert kinds >= {
        *("created", "in_progress", "completed", "output_item.added", "output_item.done", "content_part.added"),
        *("content_part.done", "reasoning_text.delta", "reasoning_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
    }


def test_a_structure_and_a_named_function_are_enforced(thinking: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = created(thinking, f'{THOUGHT}{{"a": 1}}', text=text)
    assert response["output"][1]["content"][0]["text"] == '{"a": 1}'
    assert response["text"]["format"]["schema"] == schema
    assert leaves_its_grammar(thinking, PATH, {"input": prompt_for(f"{THOUGHT}no"), "text": text})
    function = {"type": "function", "name": "f", "parameters": schema}
    assert leaves_its_grammar(thinking, PATH, {"input": prompt_for(f"{THOUGHT}{CALL}"), "tools": [function]})
    response = created(thinking, f"{THOUGHT}{CALL}", tools=[function | {"strict": False}])
    assert (response["tools"][0]["strict"], response["status"]) == (False, "completed")
    named = {"type": "function", "name": "f"}
    assert created(thinking, f"{THOUGHT}{CALL}", tools=TOOLS, tool_choice=named)["output"][1]["name"] == "f"


def test_a_turn_of_several_items_becomes_one_message() -> None:
    body = ResponseRequest.model_validate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "No jokes."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
        }
    )
    assert [message.for_template() for message in body.chat().messages] == [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": "Let me",
            "reasoning_content": "So.",
            "thinking": "So.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]


U: dict[str, Any] = {"role": "user", "content": "a"}


def fc(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": arguments}


def out(number: int, output: Any = "r") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", **fields}


SUMMARY = [{"type": "summary_text", "text": "So."}]


@pytest.mark.parametrize(
    ("items", "roles", "shown"),
    [
        ([U, thought(summary=SUMMARY), fc(1)], "user assistant", {"reasoning_content": "So.", "content": None}),
        ([U, thought(summary=SUMMARY, content=None), said("b")], "user assistant", {"reasoning_content": "So."}),
        ([U, thought(summary=[], encrypted_content="x"), fc(1)], "user assistant", {"content": None}),
        ([U, fc(1), fc(2), out(1), out(2)], "user assistant tool tool", {}),
        ([U, said("b"), fc(1), out(1), said("c")], "user assistant tool assistant", {"content": "c"}),
        ([U, said("b"), fc(1), said("c")], "user assistant", {"content": "bc"}),
        ([U, fc(1), out(1), fc(2, ""), out(2)], "user assistant tool assistant tool", {}),
        ([U, fc(1), out(1, [{"type": "input_text", "text": "x"}])], "user assistant tool", {}),
        ([U, {**said("b"), "id": "m", "status": "completed", "phase": None}, U], "user assistant user", {}),
        ([U, {"role": "assistant", "content": "b"}, thought(summary=[]), U], "user assistant user", {}),
        ([{"role": "system", "content": "s"}, U], "system user", {}),
    ],
)
def test_items_become_the_messages_of_their_turns(
    items: list[dict[str, Any]], roles: str, shown: dict[str, Any]
) -> None:
    messages = [message.for_template() for message in ResponseRequest.model_validate({"input": items}).chat().messages]
    assert [message["role"] for message in messages] == roles.split()
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), {})
    assert {name: last.get(name) for name in shown} == shown
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [item["call_id"] for item in items if item.get("type") == "function_call"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [
        item["call_id"] for item in items if item.get("type") == "function_call_output"
    ]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", [], "input"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}], "input"),
        ("input", [{"type": "item_reference", "id": "a"}], "input"),
        ("input", [{"type": {}}], "input"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", 200, "temperature"),
        ("top_k", "many", "top_k"),
        ("reasoning", {"effort": "bogus"}, "reasoning.effort"),
        ("reasoning", {"effort": "low"}, "reasoning.effort"),
        ("reasoning", {"summary": "detailed"}, "reasoning"),
        ("text", {"format": {"type": "xml"}}, "text.format"),
        ("text", {"verbosity": "low"}, "text"),
        ("tools", [{"type": "web_search"}], "tools"),
        ("tool_choice", {"type": "web_search"}, "tool_choice"),
        ("include", ["web_search_call.results"], "include"),
        ("store", True, "store"),
        ("background", True, "background"),
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("truncation", "auto", "truncation"),
        ("truncation", "bogus", "truncation"),
    ],
)
def test_an_invalid_or_unsupported_field_is_named(scripted: Serving, field: str, value: object, param: str) -> None:
    response = scripted.post(PATH, {"input": "a", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_an_error_of_a_chat_field_has_the_name_that_it_has_here() -> None:
    with pytest.raises(RequestError) as raised:
        ResponseRequest.model_validate({"input": "a", "text": {"format": {"type": "xml"}}}).chat()
    assert raised.value.param == "text.format"
    assert str(raised.value).startswith("text.format: ")


def test_responses_are_not_stored(scripted: Serving) -> None:
    client = scripted.client()
    response = client.responses.create(model="smollm2", input=prompt_for("one"))
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(response.id)


PASSED: dict[str, Any] = {
    "model": "m",
    "parallel_tool_calls": False,
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "seed": 3,
    "stop": "x",
    "stop_token_ids": [5],
    "min_tokens": 2,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a"},
    "priority": 2,
    "timeout": 3,
    "cache_salt": "me",
    "chat_template_kwargs": {"a": 1},
    "thinking_token_budget": 9,
    "include_reasoning": False,
    "receipt": True,
}


def test_every_field_that_chat_completions_honour_is_passed_on() -> None:
    unbuilt = {name for name, field in ResponseRequest.model_fields.items() if field.metadata}
    shared = set(ResponseRequest.model_fields) & set(ChatRequest.model_fields) - {"tools", "tool_choice", "metadata"}
    assert shared - unbuilt <= set(PASSED)
    for name, value in PASSED.items():
        chat = ResponseRequest.model_validate({"input": "a", name: value}).chat()
        direct = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], name: value})
        assert getattr(chat, name) == getattr(direct, name) != ChatRequest.model_fields[name].default, name


def test_a_stream_whose_generation_fails_ends_with_the_error(scripted: Serving) -> None:
    body = {"input": prompt_for("one"), "timeout": 1e-6}
    assert scripted.post(PATH, body).status_code == 408
    last = streamed_events(scripted, body)[-1]
    assert last["type"] == "response.failed"
    assert "timeout" in last["response"]["error"]["message"]


async def test_a_long_output_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, add = [], Output.add

    def adding(output: Output, delta: OutputDelta) -> list[ItemEvent]:
        threads.append(threading.current_thread())
        return add(output, delta)

    monkeypatch.setattr(Output, "add", adding)
    monkeypatch.setattr(off_loop, "current", lambda: context)
    monkeypatch.setattr(request_handler, "current", lambda: context)
    for length in (5000, 50):
        context, engine = RequestContext("a"), PlayedEngine()
        handler = handler_of(engine)
        begun = begun_response(ResponseRequest.model_validate({"input": "a"}), handler, "m")
        completing = asyncio.ensure_future(endpoint._complete(handler, begun, None))
        await asyncio.sleep(0)
        engine.generate("a" * length, end=FinishReason.LENGTH)
        await completing
    long, short = threads
    assert short is threading.current_thread()
    assert long is not short


class _Text(str):
    """A text that is not to be copied into a longer one again and again."""

    def __add__(self, other: str) -> str:
        raise AssertionError("texts are joined once")

    __radd__ = __add__


def test_the_texts_of_a_turn_are_joined_once() -> None:
    """Otherwise a body of 12,000 items, of 16 MB, takes half a minute."""
    items = [{"role": "user", "content": "a"}, *({"role": "assistant", "content": _Text("b")} for _ in range(5))]
    assert messages_of(items)[1]["content"] == "bbbbb"
