"""Bodies that cost a server much: as many values as sixteen megabytes hold, and as many as are accepted.

Each is a path, and a function that returns the body, without the memory of all of them at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastgen.server.http.json_census import MOST_ITEMS, MOST_NODES

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_SIZE = (16 << 20) - 1000
_SAY = {"messages": [{"role": "user", "content": "a"}]}
_MESSAGE = b'{"role":"user","content":"a"}'
_TOOL = (
    b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}'
)
_CALL = b'{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
_PROPERTY = b'"p%d":{"type":"string","maxLength":9}'

Body = tuple[str, Callable[[], bytes]]


def filled(before: bytes, item: bytes, after: bytes, num_nodes: int | None = None) -> bytes:
    """Return a body with a list of one item, repeated until it has `num_nodes` values or else sixteen megabytes."""
    nodes = max(1, item.count(b"{") + item.count(b"[") + item.count(b'"') // 2)
    count = (_SIZE - len(before) - len(after)) // (len(item) + 1) if num_nodes is None else num_nodes // nodes
    return before + b"[" + b",".join([item] * count) + b"]" + after


def mapped(before: bytes, key: bytes, after: bytes, num_nodes: int | None = None) -> bytes:
    """Return a body with an object of numbered keys; `key` contains %d."""
    nodes = max(1, key.count(b"{") + key.count(b'"') // 2)
    count = _SIZE // (len(key) + 7) if num_nodes is None else num_nodes // nodes
    return before + b"{" + b",".join(key % number for number in range(count)) + b"}" + after


def field(name: str, of: dict[str, Any]) -> bytes:
    """Return a body up to the value of its last field."""
    return json.dumps(of).encode()[:-1] + f',"{name}":'.encode()


def _lists() -> dict[str, tuple[str, bytes, bytes]]:
    """Return bodies with one long list: path, what comes before it, and its item."""
    prompt, message = {"prompt": "a"}, field("messages", {"model": "smollm2"})
    return {
        "messages": (CHAT, message, _MESSAGE),
        "messages that are empty": (CHAT, message, b"{}"),
        "messages with unknown fields": (CHAT, message, b'{"role":"user","content":"a","a":[],"b":{},"c":[{}]}'),
        "tools": (CHAT, field("tools", _SAY), _TOOL),
        "tools that are empty": (CHAT, field("tools", _SAY), b"{}"),
        "content parts": (CHAT, b'{"messages":[{"role":"user","content":', b'{"type":"text","text":"a"}'),
        "tool calls": (CHAT, b'{"messages":[{"role":"assistant","tool_calls":', _CALL),
        "documents": (CHAT, field("documents", _SAY), b'{"text":"a"}'),
        "stop strings": (CHAT, field("stop", _SAY), b'"a"'),
        "bad words": (COMPLETIONS, field("bad_words", prompt), b'"a"'),
        "stop tokens": (COMPLETIONS, field("stop_token_ids", prompt), b"1"),
        "allowed tokens": (COMPLETIONS, field("allowed_token_ids", prompt), b"1"),
        "choices": (COMPLETIONS, field("guided_choice", prompt), b'"a"'),
        "a schema's enum": (CHAT, field("guided_json", _SAY) + b'{"enum":', b'"a"'),
        "an ignored field": (CHAT, field("prediction", _SAY), b"[]"),
        "an unknown field": (COMPLETIONS, field("x", prompt), b"{}"),
        "prompts of one token": (COMPLETIONS, b'{"prompt":', b"[1]"),
        "prompts of one letter": (COMPLETIONS, b'{"prompt":', b'"a"'),
        "token ids": (COMPLETIONS, b'{"prompt":', b"1"),
        "long token ids": (COMPLETIONS, b'{"prompt":', b"48123"),
        "nulls": (COMPLETIONS, b'{"prompt":', b"null"),
        "input items": (RESPONSES, b'{"input":', _MESSAGE),
        "function calls": (
            RESPONSES, b'{"input":', b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
        ),
        "functions": (
            RESPONSES, b'{"input":"a","tools":', b'{"type":"function","name":"f","parameters":{"type":"object"}}'
        ),
        "texts to embed": ("/v1/embeddings", b'{"input":', b'"a"'),
        "documents to rank": ("/v1/rerank", b'{"query":"a","documents":', b'"a"'),
        "texts to score": ("/v1/score", b'{"text_1":"a","text_2":', b'"a"'),
        "messages to tokenize": ("/tokenize", b'{"messages":', _MESSAGE),
        "tokens to decode": ("/detokenize", b'{"tokens":', b"1"),
        "values without an object": (CHAT, b"", b"{}"),
    }  # fmt: skip


def _maps() -> dict[str, tuple[str, bytes, bytes]]:
    """Return bodies with one large object: path, what comes before it, and its numbered key and value."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    return {
        "a logit_bias": (COMPLETIONS, field("logit_bias", {"prompt": "a"}), b'"%d":1'),
        "metadata": (RESPONSES, field("metadata", {"input": "a"}), b'"%d":"a"'),
        "template variables": (CHAT, field("chat_template_kwargs", _SAY), b'"%d":1'),
        "a schema's properties": (
            CHAT, json.dumps({**_SAY, "response_format": schema}).encode()[:-3] + b',"properties":', _PROPERTY
        ),
        "a structural tag": (CHAT, field("structured_outputs", _SAY), b'"%d":1'),
        "unknown fields": (CHAT, field("x", _SAY), b'"%d":1'),
    }  # fmt: skip


def closing(before: bytes) -> bytes:
    """Return the brackets that end a body which begins so; no string in it contains brackets."""
    opened = list[str]()
    for letter in before.decode():
        if letter in "[{":
            opened.append({"[": "]", "{": "}"}[letter])
        elif letter in "]}":
            opened.pop()
    return "".join(reversed(opened)).encode()


def _bodies() -> dict[str, Body]:
    bodies: dict[str, Body] = {}
    for name, (path, before, item) in _lists().items():
        after = closing(before)
        bodies[f"sixteen megabytes of {name}"] = path, lambda b=before, i=item, a=after: filled(b, i, a)  # type: ignore[misc]
        nodes = MOST_ITEMS - 1000 if b'"' not in item and b"{" not in item and b"[" not in item else MOST_NODES - 100
        bodies[f"as many {name} as are accepted"] = path, lambda b=before, i=item, a=after, n=nodes: filled(b, i, a, n)  # type: ignore[misc]
    for name, (path, before, key) in _maps().items():
        after = closing(before)
        bodies[f"sixteen megabytes of {name}"] = path, lambda b=before, k=key, a=after: mapped(b, k, a)  # type: ignore[misc]
        bodies[f"as much of {name} as is accepted"] = (
            path,
            lambda b=before, k=key, a=after: mapped(b, k, a, MOST_NODES - 100),  # type: ignore[misc]
        )
    text = b'{"messages":[{"role":"user","content":"'
    return bodies | {
        "a message of sixteen megabytes": (CHAT, lambda: text + b"word " * (_SIZE // 5) + b'"}]}'),
        "a prompt of sixteen megabytes": (COMPLETIONS, lambda: b'{"prompt":"' + b"word " * (_SIZE // 5) + b'"}'),
        "a text of escapes": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\\\" * (_SIZE // 2) + b'"}'),
        "a text of escaped characters": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\u00e9" * (_SIZE // 6) + b'"}'),
        "a text of white space": (COMPLETIONS, lambda: b'{"prompt":"' + b" " * 300_000 + b'"}'),
        "a prompt of 60,000 words": (COMPLETIONS, lambda: b'{"prompt":"' + b"word " * 60_000 + b'"}'),
        "a prompt of 100,000 characters": (COMPLETIONS, lambda: b'{"prompt":"' + b"word " * 20_000 + b'"}'),
        "a text of 600 KB to tokenize": ("/tokenize", lambda: b'{"prompt":"' + b"word " * 120_000 + b'"}'),
        "log-probabilities of prompts": (
            COMPLETIONS,
            lambda: json.dumps({"prompt": [[5000] * 6200] * 2, "prompt_logprobs": 20, "max_tokens": 1}).encode(),
        ),
        "log-probabilities of an echo in a stream": (
            COMPLETIONS,
            lambda: json.dumps(
                {"prompt": [[5000] * 1500], "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
            ).encode(),
        ),
        "arguments of an earlier call": (
            CHAT,
            lambda: (
                b'{"messages":[{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f",'
                b'"arguments":"[' + b"1," * (_SIZE // 2 - 100) + b'1]"}}]}]}'
            ),
        ),
        "a schema in a string": (
            COMPLETIONS,
            lambda: b'{"prompt":"a","guided_json":"{\\"enum\\":[' + b"1," * (_SIZE // 2 - 100) + b'1]}"}',
        ),
        "white space": (COMPLETIONS, lambda: b" " * _SIZE),
        "quotes": (COMPLETIONS, lambda: b'""' * (_SIZE // 2)),
        "backslashes": (COMPLETIONS, lambda: b'"' + b"\\" * (_SIZE - 1)),
        "commas": (COMPLETIONS, lambda: b'{"prompt":[' + b"," * _SIZE),
        "digits": (COMPLETIONS, lambda: b'{"prompt":' + b"1" * _SIZE),
        "nested lists": (
            COMPLETIONS,
            lambda: filled(b'{"prompt":' + b"[" * 80, b"[" * 9 + b"]" * 9, b"]" * 80 + b"}"),
        ),
    }


# Of the bodies of sixteen megabytes, those that differ in what rejects them.
_KEPT = ("messages", "tools", "content parts", "token ids", "nulls", "an ignored field", "input items", "a logit_bias")
BODIES = {
    name: body
    for name, body in _bodies().items()
    if not name.startswith("sixteen megabytes of") or name.removeprefix("sixteen megabytes of ") in _KEPT
}
