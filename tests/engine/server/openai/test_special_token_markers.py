"""Tool calls marked by special tokens, which are hidden from clients but not from the tool-call parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.server.scripted_prompts import messages_for
from engine.server.serving import Serving, serving
from fastgen.text.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# An unused token, which is renamed to the marker.
SPARE = "<gh_stars>"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def server_with(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Serving]]:
    """Start one server per marker, with a model that has the marker as a special token."""
    started: dict[str, Serving] = {}
    with ExitStack() as stack:

        def start(mark: str) -> Serving:
            if mark not in started:
                folder = tmp_path_factory.mktemp("marked")
                write_model(folder, smollm2, mark)
                started[mark] = stack.enter_context(serving(folder, model=str(folder)))
                started[mark].wait_status("/ready", 200)
            return started[mark]

        yield start


def write_model(folder: Path, tokenizer: Tokenizer, mark: str) -> None:
    assert tokenizer.chat_template is not None
    vocabulary = tokenizer.backend.to_str()
    assert json.dumps(SPARE) in vocabulary
    (folder / "tokenizer.json").write_text(vocabulary.replace(json.dumps(SPARE), json.dumps(mark)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template.source)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize(
    ("mark", "answer"),
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
    ],
)
def test_a_tool_call_marked_by_a_special_token_is_parsed(
    server_with: Callable[[str], Serving], mark: str, answer: str
) -> None:
    server = server_with(mark)
    choice = ask(server, answer)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    chunks = streamed(server, answer)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert (calls[0]["function"]["name"], chunks[-1]["finish_reason"]) == ("f", "tool_calls")
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"a": 1}'
    assert not any(chunk["delta"].get("content") for chunk in chunks)


def test_a_marker_without_a_call_is_content(server_with: Callable[[str], Serving]) -> None:
    server, answer = server_with("<|python_tag|>"), "<|python_tag|>print(6 * 7)"
    assert ask(server, answer)["choices"][0]["message"]["content"] == answer
    assert "".join(chunk["delta"].get("content", "") for chunk in streamed(server, answer)) == answer


def test_without_tools_a_marker_is_hidden_like_any_special_token(server_with: Callable[[str], Serving]) -> None:
    choice = ask(server_with("[TOOL_CALLS]"), "[TOOL_CALLS] none", tools=None)["choices"][0]
    assert choice["message"]["content"] == " none"


def ask(server: Serving, answer: str, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": messages_for(answer), "tools": [TOOL], **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(server: Serving, answer: str) -> list[dict[str, Any]]:
    """Return the only choice of each chunk."""
    body = {"messages": messages_for(answer), "tools": [TOOL], "stream": True}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]
