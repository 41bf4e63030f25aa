"""Bodies are strict JSON, with bounds on their nesting and on the number of their values."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.server.serving import Serving
from fastgen.server.http import request_context
from fastgen.server.http.api_error import APIError
from fastgen.server.http.json_census import MOST_ITEMS, MOST_NODES, JSONCensus, largest_field
from fastgen.server.http.json_route import MAX_LEVELS, parse
from fastgen.server.http.off_loop import is_large, off_loop
from fastgen.server.http.request_context import RequestContext
from fastgen.server.openai.generation_request import ChatRequest
from fastgen.server.openai.tokenization import TokenizeRequest
from support.waiting import HANG_SECONDS


@pytest.mark.parametrize(
    "text", [b"NaN", b'"\\ud800"', b'"\xff"', b"", b"[1,]", b'{"a":1e999}', b"\xef\xbb\xbf{}", b"{} {}"]
)
def test_json_is_parsed_strictly(text: bytes) -> None:
    with pytest.raises(APIError):
        parse(text)


def test_json_nesting_is_limited() -> None:
    assert parse(b"[" * MAX_LEVELS + b"]" * MAX_LEVELS)
    assert parse(b'["' + b"[" * 5000 + b'"]') == ["[" * 5000]  # brackets in a string do not nest
    assert parse(b"[" + b"[1],{}," * 5000 + b"0]")
    for levels in (MAX_LEVELS + 1, 1 << 20):
        with pytest.raises(APIError, match="nested deeper than 100 levels"):
            parse(b"[" * levels + b"]" * levels)


def test_deep_nesting_is_rejected_with_400(scripted: Serving) -> None:
    headers = {"Content-Type": "application/json"}
    response = scripted.request("POST", "/v1/completions", content=b"[" * 60_000, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the body is not valid JSON: nested deeper than 100 levels"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\{,:'), inner),
)


def num_nodes(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(num_nodes, value))
    return 1 + sum(1 + num_nodes(inner) for inner in value.values()) if isinstance(value, dict) else 0


def num_commas(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return max(0, len(value) - 1) + sum(map(num_commas, value.values() if isinstance(value, dict) else value))


@given(value=JSON, sizes=st.lists(st.integers(1, 9), min_size=1), ascii_only=st.booleans())
def test_values_are_counted_however_the_text_is_divided(value: Any, sizes: list[int], ascii_only: bool) -> None:
    text, census, position = json.dumps(value, ensure_ascii=ascii_only).encode(), JSONCensus(), 0
    for size in itertools.cycle(sizes):
        census.feed(text[position : position + size])
        position += size
        if position >= len(text):
            break
    assert (census.num_nodes, census.num_commas) == (num_nodes(value), num_commas(value))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": "a"}] * (MOST_NODES // 5 + 1)),
        ("tools", [{}] * (MOST_NODES + 1)),
        ("stop", ["a"] * (MOST_NODES + 1)),
        ("metadata", {str(number): "a" for number in range(MOST_NODES // 2 + 1)}),
        ("prompt", [1] * (MOST_NODES + MOST_ITEMS + 2)),
    ],
)
def test_a_body_with_too_many_values_is_rejected_by_the_name_of_the_field(
    scripted: Serving, field: str, value: object
) -> None:
    response = scripted.post("/v1/chat/completions", {"model": 'a "model": [', field: value, "user": "a"})
    error = response.json()["error"]
    found = f"{MOST_ITEMS} numbers" if field == "prompt" else f"{MOST_NODES} objects, lists and strings"
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"] == (
        f"{field}: the body has more than {found}, most of them here; shorten it, or send several requests"
    )


def test_the_largest_field_of_half_a_body_is_found() -> None:
    text = json.dumps({"a": ["x"] * 9, 'b"\\é': {"c": [[]] * 99}, "d": ["x"] * 50}).encode()
    assert largest_field(text) == largest_field(text[:-60]) == json.dumps('b"\\é')[1:-1]
    assert largest_field(text[:40]) == "a"
    for no_object in (b"", b"[1]", b'"a"', b"{", b"\\\\", b'{"a', b"[[[["):
        assert largest_field(no_object) is None


def test_a_rejected_body_is_not_awaited(scripted: Serving) -> None:
    """The response comes although the client has sent only a part of the body."""
    body = b'{"messages":[' + b"{}," * (MOST_NODES + 1)
    fields = f"Host: t\r\nContent-Type: application/json\r\nContent-Length: {len(body) + 9_000_000}"
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=HANG_SECONDS) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 400"


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_of_another_type_is_rejected(scripted: Serving, kind: str) -> None:
    """A page of another site may send it without asking the server first."""
    response = scripted.request("POST", "/v1/completions", content=b'{"prompt":"a"}', headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_a_compressed_body_is_rejected(scripted: Serving) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = scripted.request("POST", "/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "encoded_body")


async def test_work_for_large_bodies_runs_in_another_thread() -> None:
    names = list[str]()
    for large in (False, True):
        token = request_context._current.set(RequestContext("a", is_large=large))
        names.append(await off_loop(lambda: threading.current_thread().name))
        request_context._current.reset(token)
    assert names[0] == threading.current_thread().name
    assert names[1].startswith("large-body")
    assert is_large(1 << 20, 1, 1)
    assert is_large(1, 1 << 14, 1)
    assert is_large(1, 1, 1 << 20)
    assert not is_large(1 << 16, 1000, 10_000)


@pytest.mark.parametrize(
    "value", ["[" + "1," * 40_000 + '"' + ",".join(["a"] * 40_000) + '"]', "[" + "[]," * 20_000 + "[]]"]
)
def test_json_in_strings_of_a_body_has_at_most_as_many_values_as_its_objects(value: str) -> None:
    """Parsing it holds the interpreter's lock. Commas in its strings do not count."""

    def asked(times: int) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": value}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]}] * times}

    ChatRequest.model_validate(asked(1))
    TokenizeRequest.model_validate(asked(1))
    for model in (ChatRequest, TokenizeRequest):
        with pytest.raises(ValidationError, match="JSON in strings with more than 65536 values; shorten it"):
            model.model_validate(asked(2))
    schema = f'{{"enum": {value}}}'
    ChatRequest.model_validate({"messages": [{"role": "user"}], "guided_json": schema})
    with pytest.raises(ValidationError, match="JSON in strings with more than 65536 values"):
        ChatRequest.model_validate({"messages": [{"role": "user"}], "guided_json": f"[{schema}, {schema}]"})
