"""Invalid request bodies."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HUGE = 10**400
SAY = {"messages": [{"role": "user", "content": "a"}]}

INVALID: dict[str, tuple[str, Any]] = {
    "a prompt of 10 MB": (COMPLETIONS, {"prompt": "lorem ipsum " * 850_000}),
    "a message of 10 MB": (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}),
    "a million prompts": (COMPLETIONS, {"prompt": [[1]] * 1_000_000}),
    "a bad word of 10 MB": (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 10_000_000]}),
    "a million token ids": (COMPLETIONS, {"prompt": [1] * 1_000_000}),
    "a thousand stops": (COMPLETIONS, {"prompt": "a", "stop": [f"stop {i}" for i in range(1000)]}),
    "a prompt that is a number": (COMPLETIONS, {"prompt": 7}),
    "a prompt of mixed kinds": (COMPLETIONS, {"prompt": ["a", 1, None]}),
    "no prompt in a list": (COMPLETIONS, {"prompt": []}),
    "an empty token list": (COMPLETIONS, {"prompt": [[]]}),
    "a token that is none": (COMPLETIONS, {"prompt": [-1]}),
    "a token beyond all": (COMPLETIONS, {"prompt": [1 << 62]}),
    "a text for max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}),
    "a negative max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    "a huge max_tokens": (COMPLETIONS, {"prompt": "a", "max_tokens": 1 << 62}),
    "a temperature below zero": (COMPLETIONS, {"prompt": "a", "temperature": -0.1}),
    "a huge temperature": (COMPLETIONS, {"prompt": "a", "temperature": 1e308}),
    "a seed beyond all": (COMPLETIONS, {"prompt": "a", "seed": 1 << 80}),
    "an object for a model": (COMPLETIONS, {"prompt": "a", "model": {}}),
    "a stop that is empty": (COMPLETIONS, {"prompt": "a", "stop": ""}),
    "messages that are a text": (CHAT, {"messages": "hello"}),
    "a message that is a list": (CHAT, {"messages": [[]]}),
    "a role that is a number": (CHAT, {"messages": [{"role": 1, "content": "a"}]}),
    "content of an unknown kind": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "n beyond all": (CHAT, {**SAY, "n": 1 << 40}),
    "biases that are a list": (CHAT, {**SAY, "logit_bias": [1, 2]}),
    "a bias for no token": (CHAT, {**SAY, "logit_bias": {"zzz": 1}}),
    "a list for a body": (COMPLETIONS, [1]),
    "null for a body": (CHAT, None),
}
RAW: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"prompt": "a"',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "a number out of range": b'{"prompt": "a", "temperature": 1e999}',
    "a number of 400 digits": b'{"prompt": "a", "seed": %d}' % HUGE,
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\xf0\x9f"}',
    "a lone surrogate": b'{"prompt": "\\ud83d"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "deep lists": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "deep objects": b'{"prompt": "a", "user": ' + b'{"a":' * 300_000 + b"1" + b"}" * 300_000 + b"}",
    "deep in an unknown field": b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "zeros": b"\0" * 1000,
    "a million commas": b'{"prompt": [' + b"," * 1_000_000 + b"]}",
}


def is_rejected(status: int, body: dict[str, Any]) -> bool:
    return 400 <= status < 500 and set(body["error"]) == {"message", "type", "param", "code"}
