"""Chats and responses of models that write Harmony's messages (gpt-oss); see `harmony_model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.server.harmony_model import write_harmony_model
from engine.server.openai.test_reasoning import PATH, message
from engine.server.openai.test_responses import created
from engine.server.openai_types import check_chat, complete
from engine.server.scripted_prompts import messages_for
from engine.server.serving import Serving, leaves_its_grammar
from fastgen.model.source import ModelSource
from fastgen.text.tokenizer import Tokenizer

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>It is Bern."
CALL = f'{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"city": "Bern"}}'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
FLAT_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
QUESTION = {"role": "user", "content": "Where?"}


def prompt_of(server: Serving, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return the text of the prompt of a conversation."""
    tokens = server.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]
    text: str = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    return text


def test_thoughts_and_the_answer_are_separated(harmony: Serving) -> None:
    choice = message(harmony, ANSWER)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me see.", "It is Bern.")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("end", ["", "<|call|>"])
def test_a_call_ends_the_generation(harmony: Serving, end: str) -> None:
    choice = message(harmony, f"{CALL}{end}", tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"city": "Bern"}'}
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me see.", None)


def test_a_function_that_a_header_cannot_name_is_refused(harmony: Serving) -> None:
    """Its call would be read as one of another function."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "f g")]
    answer = harmony.post(PATH, {"messages": messages_for(ANSWER), "tools": tools})
    assert answer.status_code == 400
    assert "the name 'f g' cannot be parsed" in answer.json()["error"]["message"]
    assert harmony.post(PATH, {"messages": messages_for(ANSWER), "tools": tools, "tool_choice": "none"}).is_success
    flat = [{"type": "function", "name": "f g"}]
    assert harmony.post("/v1/responses", {"input": "a", "tools": flat}).status_code == 400


def test_the_marks_that_end_a_generation_come_from_the_checkpoint(smollm2: Tokenizer, tmp_path: Path) -> None:
    write_harmony_model(tmp_path, smollm2)
    ends = Tokenizer.load(tmp_path).added_ids_of(["<|return|>", "<|call|>"])
    assert len(ends) == 2
    assert ends < ModelSource.open(str(tmp_path)).architecture.eos_token_ids


def test_replies_have_the_official_clients_types(harmony: Serving) -> None:
    check_chat(harmony, {"messages": messages_for(ANSWER), "logprobs": True, "n": 2})
    check_chat(harmony, {"messages": messages_for(CALL), "tools": TOOLS})


def test_tokens_of_thoughts_are_counted(harmony: Serving) -> None:
    reply = complete(harmony, PATH, {"messages": messages_for(ANSWER)})
    thought = harmony.post("/tokenize", {"prompt": THOUGHT.removesuffix("<|start|>assistant")}).json()["tokens"]
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thought)}


def test_responses_have_items_of_thoughts_calls_and_text(harmony: Serving) -> None:
    thought, text = created(harmony, ANSWER)["output"]
    assert thought["content"][0]["text"] == "Let me see."
    assert text["content"][0]["text"] == "It is Bern."
    thought, call = created(harmony, CALL, tools=FLAT_TOOLS)["output"]
    assert thought["content"][0]["text"] == "Let me see."
    assert (call["name"], call["arguments"]) == ("f", '{"city": "Bern"}')


def test_the_history_has_thoughts_calls_and_results(harmony: Serving) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    history: list[dict[str, Any]] = [
        QUESTION,
        {"role": "assistant", "content": None, "reasoning_content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ]
    prompt = prompt_of(harmony, history, tools=TOOLS)
    assert prompt.endswith(
        "<|start|>user<|message|>Where?<|end|><|start|>assistant<|channel|>analysis<|message|>Let me see.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"Sunny"<|end|><|start|>assistant'
    )
    reply = harmony.post(PATH, {"messages": [QUESTION, history[2]]})
    assert reply.status_code == 400
    assert "a result without a call" in reply.json()["error"]["message"]


def test_the_effort_of_reasoning_is_in_the_prompt(harmony: Serving) -> None:
    assert "Reasoning: high" in prompt_of(harmony, [QUESTION], reasoning_effort="high")
    assert "Reasoning: medium" in prompt_of(harmony, [QUESTION])


def test_a_structure_applies_to_the_answer_alone(harmony: Serving) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    got = message(harmony, f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}', **fields)["message"]
    assert (got["reasoning_content"], got["content"]) == ("Let me see.", '{"a": 1}')
    assert leaves_its_grammar(harmony, PATH, {"messages": messages_for(ANSWER), **fields})


def test_a_required_call_is_enforced(harmony: Serving) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    choice = message(harmony, CALL, **fields)
    assert choice["finish_reason"] == "tool_calls"
    assert leaves_its_grammar(harmony, PATH, {"messages": messages_for(ANSWER), **fields})


def test_stop_strings_apply_to_the_answer(harmony: Serving) -> None:
    choice = message(harmony, f"{THOUGHT}<|channel|>final<|message|>I see. Yes.", stop=" see")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me see.", "I")
