"""Validates complete and streamed replies strictly against OpenAI's types."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.server.serving import Serving


def events(server: Serving, path: str, body: dict[str, Any]) -> list[Any]:
    response = server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]", response.text
    return [json.loads(chunk) for chunk in chunks]


def complete(server: Serving, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def without_the_first(reply: Any) -> Any:
    """Drop the null logprob of an echo's first token, which OpenAI's API sends but its types do not allow."""
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]
        if logprobs and logprobs["token_logprobs"][:1] == [None]:
            for values in logprobs.values():
                del values[0]
    return reply


def check_completion(server: Serving, body: dict[str, Any]) -> None:
    """Validate the reply of /v1/completions and, unless the body sets `stream`, its stream."""
    reply = without_the_first(complete(server, "/v1/completions", body))
    Completion.model_validate(reply, strict=True)
    if "stream" in body:
        return
    chunks = [without_the_first(chunk) for chunk in events(server, "/v1/completions", body)]
    for chunk in chunks[:-1]:
        # This type does not allow a chunk without finish_reason.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)
    assert chunks[-1]["usage"]["total_tokens"] == reply["usage"]["total_tokens"]


def check_chat(server: Serving, body: dict[str, Any]) -> None:
    """Validate the reply of /v1/chat/completions and its stream."""
    reply = complete(server, "/v1/chat/completions", body)
    ChatCompletion.model_validate(reply, strict=True)
    assert reply["id"].startswith("chatcmpl-")
    chunks = [ChatCompletionChunk.model_validate(c, strict=True) for c in events(server, "/v1/chat/completions", body)]
    assert {chunk.id for chunk in chunks} != {reply["id"]}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == reply["usage"]["total_tokens"]
    assert {chunk.system_fingerprint for chunk in chunks} == {reply["system_fingerprint"]}
