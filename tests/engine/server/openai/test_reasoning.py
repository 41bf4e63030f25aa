"""Chats of models that think before they answer; see `thinking_model`."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.openai_types import check_chat, complete, events
from engine.server.scripted_prompts import messages_for
from engine.server.serving import Serving, leaves_its_grammar

# As Qwen3-Thinking and DeepSeek-R1: the prompt opens the reasoning.
OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
PATH = "/v1/chat/completions"


def message(server: Serving, reply: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice; its stream must carry the same message."""
    body = {"messages": messages_for(reply), **fields}
    choice: dict[str, Any] = complete(server, PATH, body)["choices"][0]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server, PATH, body)[:-1]]
    for name in ("reasoning_content", "reasoning", "content"):
        streamed = "".join(delta.get(name, "") for delta in deltas)
        assert streamed == (choice["message"].get(name) or ""), name
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    arguments = "".join(call["arguments"] for call in calls)
    assert arguments == "".join(call["function"]["arguments"] for call in choice["message"].get("tool_calls", []))
    return choice


def test_reasoning_is_separated_from_the_content(thinking: Serving) -> None:
    got = message(thinking, f"{THOUGHT}It is Bern.")["message"]
    assert (got["reasoning_content"], got["reasoning"]) == ("Let me see.", "Let me see.")
    assert got["content"] == "It is Bern."


def test_a_reply_with_reasoning_has_the_official_clients_types(thinking: Serving) -> None:
    check_chat(thinking, {"messages": messages_for(f"{THOUGHT}It is Bern."), "logprobs": True, "n": 2})
    check_chat(thinking, {"messages": messages_for(f"{THOUGHT}{CALL}"), "tools": TOOLS})


def test_reasoning_tokens_are_counted(thinking: Serving) -> None:
    body = {"messages": messages_for(f"{THOUGHT}It is Bern."), "return_token_ids": True}
    reply = complete(thinking, PATH, body)
    closing = thinking.post("/tokenize", {"prompt": "</think>"}).json()["tokens"]
    place = reply["choices"][0]["token_ids"].index(*closing) + 1
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": place}
    assert events(thinking, PATH, body)[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": place}


def test_reasoning_can_be_left_out(thinking: Serving) -> None:
    got = message(thinking, f"{THOUGHT}Yes", include_reasoning=False)["message"]
    assert "reasoning_content" not in got
    assert got["content"] == "Yes"


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({"stop": "HALT"}, "No HALT yet.", "The answer "),
        ({"stop": ["yet", "HALT"], "include_stop_str_in_output": True}, "No HALT yet.", "The answer HALT"),
        ({"stop": ["\n"]}, "No HALT yet.", "The answer HALT now."),
        ({"stop": "yet.\n</think>"}, "No HALT yet.", "The answer HALT now."),
    ],
)
def test_stop_strings_apply_to_the_content(
    thinking: Serving, fields: dict[str, Any], reasoning: str, content: str
) -> None:
    choice = message(thinking, "<think>\nNo HALT yet.\n</think>\n\nThe answer HALT now.", **fields)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == (reasoning, content)
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ("HALT" if "now" not in content else None)


def test_unfinished_reasoning_is_no_content(thinking: Serving) -> None:
    choice = message(thinking, "<think>one two three four five", max_tokens=4)
    assert choice["message"]["reasoning_content"] == "one two three"
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


def test_a_reply_without_reasoning_is_content(thinking: Serving) -> None:
    got = message(thinking, "It is <Bern>.")["message"]
    assert got["content"] == "It is <Bern>."
    assert "reasoning_content" not in got


def test_a_prompt_may_open_the_reasoning(thinking: Serving) -> None:
    got = message(thinking, "So.\n</think>\n\nYes", chat_template=OPENING)["message"]
    assert (got["reasoning_content"], got["content"]) == ("So.", "Yes")


@pytest.mark.parametrize("off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_thinking_can_be_turned_off(thinking: Serving, off: dict[str, Any]) -> None:
    question = {"messages": [{"role": "user", "content": "Hi"}]}
    tokens = thinking.post("/tokenize", {**question, **off}).json()["tokens"]
    assert thinking.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith("<think>\n\n</think>\n\n")
    high = thinking.post("/tokenize", {**question, "reasoning_effort": "high"}).json()["tokens"]
    assert high == thinking.post("/tokenize", question).json()["tokens"]
    got = message(thinking, "<think>Yes", **off)["message"]
    assert got["content"] == "<think>Yes"


def test_only_calls_after_the_reasoning_are_calls(thinking: Serving) -> None:
    choice = message(thinking, f"<think>\nShould I {CALL}?\n</think>\n\nNo.", tools=TOOLS)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert CALL in choice["message"]["reasoning_content"]
    choice = message(thinking, f"<think>\n{CALL}\n</think>\n\n{CALL}", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"city": "Bern"}'),
        ({"regex": "[A-Z][a-z]+"}, "Bern"),
        ({"tools": TOOLS, "tool_choice": "required"}, CALL),
    ],
)
def test_a_structure_applies_after_the_reasoning(thinking: Serving, fields: dict[str, Any], answer: str) -> None:
    choice = message(thinking, f"{THOUGHT}{answer}", **fields)
    assert choice["finish_reason"] in ("stop", "tool_calls")
    assert choice["message"]["reasoning"] == "Let me see."
    assert choice["message"]["content"] in (answer, None)
    assert leaves_its_grammar(thinking, PATH, {"messages": messages_for(f"{THOUGHT}no {answer}"), **fields})


def test_a_strict_function_binds_only_what_follows_the_reasoning(thinking: Serving) -> None:
    city = {"type": "object", "properties": {"city": {"const": "Bern"}}, "required": ["city"]}
    strict = [{"type": "function", "function": {"name": "f", "parameters": city, "strict": True}}]
    wrong = CALL.replace("Bern", "Rome")
    choice = message(thinking, f"<think>\n{wrong}?\n</think>\n\n{CALL}", tools=strict)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == f"{wrong}?"
    assert message(thinking, f"{THOUGHT}It is Bern.", tools=strict)["finish_reason"] == "stop"
    body = {"messages": messages_for(f"{THOUGHT}So: {wrong}"), "tools": strict}
    assert leaves_its_grammar(thinking, PATH, body)
    assert message(thinking, f"{THOUGHT}So: {wrong}", tools=TOOLS)["finish_reason"] == "tool_calls"


# The prompt that Qwen3's published template gives for `CONVERSATION`. A random comparison of the template in
# `thinking_model` with the published one found no difference.
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need f.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Rain"},
]
PROMPT = """<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
Hello!<|im_end|>
<|im_start|>user
Weather in Bern?<|im_end|>
<|im_start|>assistant
<think>
I need f.
</think>

<tool_call>
{"name": "f", "arguments": {"city": "Bern"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
Rain
</tool_response><|im_end|>
<|im_start|>assistant
"""


def test_a_conversation_with_calls_becomes_the_prompt_of_qwen3(thinking: Serving) -> None:
    tokens = thinking.post("/tokenize", {"messages": CONVERSATION, "tools": TOOLS}).json()["tokens"]
    assert thinking.post("/detokenize", {"tokens": tokens}).json()["prompt"] == PROMPT


def test_the_official_client_streams_a_turn_after_a_call(thinking: Serving) -> None:
    asked: Any = [*CONVERSATION, *messages_for(f"{THOUGHT}Rain.")]
    chunks = list(
        thinking.client().chat.completions.create(
            model=thinking.get("/v1/models").json()["data"][0]["id"],
            messages=asked,
            tools=TOOLS,
            stream=True,  # type: ignore[call-overload]
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Rain."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_budget_limits_the_reasoning(thinking: Serving) -> None:
    assert message(thinking, f"{THOUGHT}Yes", thinking_token_budget=20)["finish_reason"] == "stop"
    assert leaves_its_grammar(thinking, PATH, {"messages": messages_for(f"{THOUGHT}Yes"), "thinking_token_budget": 2})
    assert message(thinking, f"{THOUGHT}Yes", thinking_token_budget=-1)["finish_reason"] == "stop"


def test_earlier_reasoning_reaches_the_template_under_either_name(thinking: Serving) -> None:
    def prompt(**fields: str) -> list[int]:
        earlier = {"role": "assistant", "content": "Yes", **fields}
        body = {"messages": [{"role": "user", "content": "Hi"}, earlier], "add_generation_prompt": False}
        tokens: list[int] = thinking.post("/tokenize", body).json()["tokens"]
        return tokens

    assert prompt(reasoning="So.") == prompt(reasoning_content="So.") != prompt()


@pytest.mark.parametrize(("field", "value"), [("thinking_token_budget", 9), ("reasoning_effort", "low")])
def test_a_model_without_reasoning_refuses_its_fields(scripted: Serving, field: str, value: object) -> None:
    response = scripted.post(PATH, {"messages": messages_for("a"), field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
