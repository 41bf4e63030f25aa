"""Bodies that no client should send: each is refused as the client's mistake, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from engine.server.serving import Serving, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HUGE = 10**400
SAY = {"messages": [{"role": "user", "content": "a"}]}

REFUSED: dict[str, tuple[str, Any]] = {
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
KINDS = [
    "text/plain", "application/xml", "multipart/form-data", "multipart/form-data; boundary=x", "garbage", "",
    "application/x-www-form-urlencoded", "application/json; charset=utf-16", "a" * 5000,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays(scripted: Serving) -> Any:
    scripted.post(COMPLETIONS, {"prompt": "a"})
    before = scripted.num_files()
    yield
    wait_until(lambda: scripted.num_files() <= before, "connections to be closed", 5)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
        assert scripted.metric(f"fastgen_{name}") == 0
    assert "Traceback" not in scripted.log
    assert scripted.post(COMPLETIONS, {"prompt": "a"}).status_code == 200


def is_refused(status: int, body: dict[str, Any]) -> bool:
    return 400 <= status < 500 and set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_makes_no_sense_is_the_clients_mistake(scripted: Serving, name: str) -> None:
    path, body = REFUSED[name]
    answered = scripted.post(path, body)
    assert is_refused(answered.status_code, answered.json())
    assert len(answered.content) < 2000, "an error does not repeat what was sent"


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_no_json_is_the_clients_mistake(scripted: Serving, name: str) -> None:
    answered = scripted.request("POST", COMPLETIONS, content=RAW[name], headers=JSON)
    assert is_refused(answered.status_code, answered.json())


def test_what_was_refused_leaves_no_memory_behind(scripted: Serving) -> None:
    def every() -> int:
        for path, body in REFUSED.values():
            scripted.post(path, body)
        for content in RAW.values():
            scripted.request("POST", COMPLETIONS, content=content, headers=JSON)
        return scripted.resident_bytes()

    first = [every() for _ in range(3)]  # what the allocator takes once
    later = [every() for _ in range(5)]
    assert max(later) <= max(first) * 1.02


@pytest.mark.parametrize("kind", KINDS)
def test_a_content_type_other_than_json_is_no_crash(scripted: Serving, kind: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    answered = scripted.request("POST", COMPLETIONS, content=body, headers={"Content-Type": kind})
    assert answered.status_code == 200 or is_refused(answered.status_code, answered.json())
    assert kind.startswith("application/json") or answered.status_code != 200


CONTRADICTIONS: dict[str, bytes] = {
    "no size": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a huge size": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "a negative length": b"Content-Length: -5\r\n\r\n{}",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "control characters": b"X: \x00\x01\r\n\r\n",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_http_that_contradicts_itself_is_refused_and_closed(scripted: Serving, name: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=20) as connection:
        connection.sendall(head + CONTRADICTIONS[name])
        answer = b""
        while received := connection.recv(65536):
            answer += received
    assert b" 400 " in answer.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/v1//completions", "/%00", "/v1/completions%2f..", "/" + "a" * 5000]
)
def test_a_path_that_is_not_served_is_not_found(scripted: Serving, path: str) -> None:
    assert scripted.request("POST", path, json={}).status_code in (307, 404)
