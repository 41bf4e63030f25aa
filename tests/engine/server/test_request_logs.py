"""Request ids in headers and logs, and the two log formats."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from engine.server.serving import Serving, serving
from fastgen.logs import JSONFormatter, TextFormatter, request_id
from support.waiting import wait_until


@pytest.fixture(scope="module")
def structured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("structured"), "--log-format", "json") as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/health", 200), ("GET", "/nowhere", 404), ("PUT", "/health", 405), ("POST", "/v1/completions", 400),
])  # fmt: skip
def test_every_response_echoes_the_request_id(scripted: Serving, method: str, path: str, status: int) -> None:
    answered = scripted.request(method, path, headers={"X-Request-Id": "from-the-client"})
    assert (answered.status_code, answered.headers["X-Request-Id"]) == (status, "from-the-client")


def test_a_stream_echoes_the_request_id(scripted: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    streamed = scripted.request("POST", "/v1/completions", json=body, headers={"X-Request-Id": "streamed-1"})
    assert streamed.headers["X-Request-Id"] == "streamed-1"


@pytest.mark.parametrize("given", [None, "", "a b", "é".encode(), "x" * 129])
def test_an_invalid_or_missing_request_id_is_replaced(scripted: Serving, given: str | bytes | None) -> None:
    headers = {} if given is None else {b"X-Request-Id": given if isinstance(given, bytes) else given.encode()}
    made = [scripted.request("GET", "/health", headers=headers).headers["X-Request-Id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_log_lines_carry_the_request_id(scripted: Serving) -> None:
    body = {"prompt": "a b c", "max_tokens": 4}
    scripted.request("POST", "/v1/completions", json=body, headers={"X-Request-Id": "logged-1"})
    scripted.request("POST", "/v1/completions", json={**body, "top_p": 7}, headers={"X-Request-Id": "logged-2"})
    (line,) = (line for line in scripted.log.splitlines() if "request_id=logged-1" in line)
    assert " INFO request id=cmpl-" in line
    (line,) = (line for line in scripted.log.splitlines() if "request_id=logged-2" in line)
    assert "rejected status=400 code=invalid_value param=top_p" in line


def test_every_log_line_is_json_with_log_format_json(structured: Serving) -> None:
    body = {"prompt": "a b c", "max_tokens": 4}
    structured.request("POST", "/v1/completions", json=body, headers={"X-Request-Id": "logged-3"})
    wait_until(lambda: "logged-3" in structured.log, "the request's line")
    lines = [json.loads(line) for line in structured.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    (line,) = (line for line in lines if line.get("request_id") == "logged-3")
    assert line["message"] == "request"
    assert (line["status"], line["finish"], line["prompt_tokens"], line["completion_tokens"]) == (200, "length", 3, 4)


@pytest.mark.parametrize("formatter", [TextFormatter(), JSONFormatter()])
def test_a_traceback_is_logged_with_its_request_id(formatter: logging.Formatter) -> None:
    token = request_id.set("mine")
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
        text = formatter.format(record)
    finally:
        request_id.reset(token)
    assert "it failed" in text
    assert "mine" in text
    assert "ValueError: broken" in text
