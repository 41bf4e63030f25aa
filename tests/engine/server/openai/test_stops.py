"""Stop strings over HTTP: streamed and whole answers are the same, in tool calls and in responses too."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.openai.test_reasoning import message
from engine.server.openai.test_responses import streamed_events
from engine.server.openai_types import events
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
TEXT = "one two<repo_name>three"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern STOP now"}}\n</tool_call>'
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("fields", "text", "stop_reason"),
    [
        ({"stop": []}, "one twothree", None),
        ({"stop": None}, "one twothree", None),
        ({"stop": ["wo", "two", "tw"]}, "one ", "tw"),
        ({"stop": ["two", "tw"], "include_stop_str_in_output": True}, "one tw", "tw"),
        ({"stop": ["two", "tw"], "no_stop_trim": True}, "one tw", "tw"),
        ({"stop": ["e t", "one two"]}, "on", "e t"),
        ({"stop": "two<repo_name>th"}, "one ", "two<repo_name>th"),
        ({"stop": "<|im_end|>"}, "one twothree", "<|im_end|>"),  # the model's end token
        ({"stop": "<|im_end|>", "ignore_eos": True}, "one twothree", "<|im_end|>"),
        ({"stop": "<|im_end|>", "include_stop_str_in_output": True}, "one twothree<|im_end|>", "<|im_end|>"),
        ({"stop": "ee<|im_end|>"}, "one twothr", "ee<|im_end|>"),
        ({"stop": "two<repo_name>", "skip_special_tokens": False}, "one ", "two<repo_name>"),
        ({"stop": ["one", "two"], "min_tokens": 2}, "one ", "two"),
        ({"stop": ["one", "two"], "min_tokens": 3}, "one twothree", None),
        ({"stop": "tw", "n": 3, "seed": 1}, "one ", "tw"),
        ({"stop": "</s>"}, "one twothree", None),  # no token of this model
    ],
)
def test_a_streamed_answer_ends_as_a_whole_one(
    scripted: Serving, fields: dict[str, Any], text: str, stop_reason: str | None
) -> None:
    body = {"prompt": prompt_for(TEXT), "max_tokens": 12, **fields}
    expected = [(text, "stop", stop_reason)] * fields.get("n", 1)
    choices = scripted.post(COMPLETIONS, body).json()["choices"]
    assert [(each["text"], each["finish_reason"], each["stop_reason"]) for each in choices] == expected
    streamed = [["", None, None] for _ in expected]
    for chunk in events(scripted, COMPLETIONS, body):
        for choice in chunk["choices"]:
            seen = streamed[choice["index"]]
            seen[0] += choice["text"]
            seen[1:] = [choice["finish_reason"], choice.get("stop_reason")]
    assert [tuple(each) for each in streamed] == expected
    of_responses = {"input": body.pop("prompt"), "max_output_tokens": body.pop("max_tokens"), **fields}
    if body.pop("n", 1) == 1:
        assert [part["text"] for part in response_items(scripted, of_responses)[0]["content"]] == [text]


def response_items(server: Serving, body: dict[str, Any]) -> list[Any]:
    """Return the items of a response, without ids; its stream must end with the same."""
    whole = server.post(RESPONSES, body).json()["output"]
    streamed = streamed_events(server, body)[-1]["response"]["output"]
    for item in (*whole, *streamed):
        item.pop("id")
        item.pop("call_id", None)
    assert whole == streamed
    return list(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stop", value) for value in ("", [""], ["a", ""], 5, ["a", 5], {"a": 1}, ["x"] * 65, "x" * 1025)),
        *(("stop_token_ids", value) for value in ([49152], [-1], [1 << 31], [1 << 70], ["a"], 5, [True], [1.5])),
        ("min_tokens", -1),
        ("min_tokens", 13),
    ],
)
def test_a_stop_that_cannot_be_is_rejected_by_its_name(scripted: Serving, field: str, value: Any) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a", "max_tokens": 12}),
        (RESPONSES, {"input": "a", "max_output_tokens": 12}),
    ):
        response = scripted.post(path, {**body, "stop": ["a"], field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("reply", "fields", "content", "arguments", "reason"),
    [
        (f"Hi {CALL}", {"stop": "STOP"}, "Hi", '{"city": "Bern ', "stop"),
        (CALL, {"stop": "STOP", "include_stop_str_in_output": True}, None, '{"city": "Bern STOP', "stop"),
        (CALL, {"stop": "STOP", "tool_choice": "required"}, None, '{"city": "Bern ', "stop"),
        (CALL, {"stop": "</tool_call>"}, None, '{"city": "Bern STOP now"}', "tool_calls"),
        (f"{CALL}\nmore HALT it", {"stop": "HALT"}, "\nmore", '{"city": "Bern STOP now"}', "tool_calls"),
        (f"STOP {CALL}", {"stop": "STOP"}, "", None, "stop"),
        (f"Hi {CALL}", {"stop": "<tool_call>"}, "Hi ", None, "stop"),
        (f"<think>\nSTOP?\n</think>\n\n{CALL}", {"stop": "STOP"}, None, '{"city": "Bern ', "stop"),
    ],
)
def test_a_stop_string_in_a_tool_call_leaves_no_finished_call(
    thinking: Serving, reply: str, fields: dict[str, Any], content: str | None, arguments: str | None, reason: str
) -> None:
    choice = message(thinking, reply, tools=TOOLS, max_tokens=60, **fields)
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
    body = {"messages": messages_for(reply), "tools": TOOLS, "max_tokens": 60, **fields}
    chunks = events(thinking, "/v1/chat/completions", body)
    assert chunks[-2]["choices"][0]["finish_reason"] == reason
    tools = [{"type": "function", "strict": False, **TOOL}]
    items = response_items(thinking, {"input": prompt_for(reply), "tools": tools, "max_output_tokens": 60, **fields})
    found = [(item["arguments"], item["status"]) for item in items if item["type"] == "function_call"]
    status = "completed" if reason == "tool_calls" else "incomplete"
    assert found == ([] if arguments is None else [(arguments, status)])
