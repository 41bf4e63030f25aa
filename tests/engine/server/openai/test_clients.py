"""Every kind of reply against OpenAI's types and common clients."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.openai_types import check_chat, check_completion
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '{"name": "add", "arguments": {"a":1}}'
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "seed": 1},
    "prompts": {"prompt": [prompt_for("a"), prompt_for("b")]},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "scored": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "stopped": {"stop": ["three"]},
    "structure": {"prompt": prompt_for('{"a": 1}'), "response_format": {"type": "json_object"}},
    "best": {"best_of": 3, "n": 2, "stream": False},
    "prompt logprobs": {"prompt_logprobs": 1, "stream": False},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "seed": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tool call": {"messages": messages_for(CALL), "tools": [TOOL]},
    "required": {"messages": messages_for(CALL), "tools": [TOOL], "tool_choice": "required", "logprobs": True},
    "structure": {"messages": messages_for('{"a": 1}'), "response_format": {"type": "json_object"}},
    "stopped": {"stop": "three", "max_completion_tokens": 9},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_every_completion_validates_against_openais_types(scripted: Serving, name: str) -> None:
    check_completion(scripted, {"prompt": prompt_for("one two three four"), **COMPLETIONS[name]})


@pytest.mark.parametrize("name", CHATS)
def test_every_chat_completion_validates_against_openais_types(scripted: Serving, name: str) -> None:
    check_chat(scripted, {"messages": messages_for("one two three four"), **CHATS[name]})


def test_langchain_can_chat_stream_call_tools_and_parse_structured_output(scripted: Serving) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int

    def add(a: int) -> int:
        """Add."""
        return a

    model = ChatOpenAI(model="smollm2", base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)  # type: ignore[arg-type]
    answer = model.invoke(prompt_for("Hello you"))
    assert answer.content == "Hello you"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in model.stream(prompt_for("one two three"))) == "one two three"
    with_tools = model.bind_tools([add])
    assert with_tools.invoke(prompt_for(CALL)).tool_calls[0]["args"] == {"a": 1}
    streamed = None
    for chunk in with_tools.stream(prompt_for(CALL)):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.tool_calls[0]["name"] == "add"  # type: ignore[attr-defined]
    called = model.with_structured_output(Sum, method="function_calling").invoke(
        prompt_for('{"name": "Sum", "arguments": {"a":2}}')
    )
    assert called == Sum(a=2)
    assert model.with_structured_output(Sum, method="json_schema").invoke(prompt_for('{"a":3}')) == Sum(a=3)


def test_litellm_completes_and_streams(scripted: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a price list
    import litellm

    target: dict[str, Any] = {"model": "openai/smollm2", "api_base": f"{scripted.url}/v1", "api_key": "none"}
    done = litellm.completion(messages=messages_for("Hello you"), **target)
    assert done.choices[0].message.content == "Hello you"
    assert done.usage.completion_tokens > 0
    called = litellm.completion(messages=messages_for(CALL), tools=[TOOL], **target)
    assert called.choices[0].message.tool_calls[0].function.name == "add"
    chunks = litellm.completion(messages=messages_for("one two three"), stream=True, **target)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
