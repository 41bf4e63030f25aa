"""No grammar ends a server or its engine, and none of them outlives it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.server.scripted_prompts import messages_for
from engine.server.serving import REAL, Serving, serving
from support.waiting import wait_until

_LEAST = -(1 << 63)
_BOUNDS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": _LEAST, "maximum": _LEAST}}}
_MESSAGES = [{"role": "user", "content": "x"}]
_FUNCTION = {"name": "f", "parameters": _BOUNDS}


def chain(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"\n'


# Each took the server or the engine with it, or seconds and gigabytes; with the status that is right.
# BUSY may get 503 on a machine that is too busy to spend the two seconds within a minute.
BUSY = "automaton"
HOSTILE: dict[str, tuple[str, dict[str, Any], int]] = {
    "bounds": ("completions", {"guided_json": _BOUNDS}, 400),
    "const": ("completions", {"guided_json": {"const": _LEAST}}, 400),
    "enum": ("completions", {"structured_outputs": {"json": {"enum": [0, _LEAST]}}}, 400),
    "range": ("completions", {"guided_json": {"type": "integer", "minimum": _LEAST, "maximum": 5}}, 200),
    "rules": ("completions", {"guided_grammar": chain(2700)}, 400),
    "ebnf": ("completions", {"guided_grammar": chain(600).replace("start:", "root ::=").replace(": ", " ::= ")}, 200),
    "multiple": ("completions", {"guided_json": {"type": "integer", "multipleOf": 123456789}}, 400),
    "automaton": ("completions", {"guided_grammar": "start: X\nX: /(.*a.{15})/ & /(.*b.{14})/ & ~/(.*c.{13})/"}, 400),
    "references": (
        "completions",
        {
            "guided_json": {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)} | {"d1800": {}},
            }
        },
        400,
    ),
    "structure of a chat": (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": _LEAST}}}},
        400,
    ),
    "required tool": (
        "chat/completions",
        {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
        400,
    ),
    "strict tool": (
        "chat/completions",
        {"tools": [{"type": "function", "function": {**_FUNCTION, "strict": True}}]},
        400,
    ),
    "tool": ("chat/completions", {"tools": [{"type": "function", "function": _FUNCTION}]}, 200),
    "tool of a response": ("responses", {"tools": [{"type": "function", **_FUNCTION}]}, 200),
    "strict tool of a response": ("responses", {"tools": [{"type": "function", "strict": True, **_FUNCTION}]}, 400),
}


def ask(server: Serving, path: str, fields: dict[str, Any]) -> Any:
    start: dict[str, Any] = {"max_tokens": 4, "prompt": "x"}
    if path == "chat/completions":
        start = {"max_tokens": 4, "messages": _MESSAGES}
    elif path == "responses":
        start = {"max_output_tokens": 4, "input": "x"}
    return server.post(f"/v1/{path}", {**start, **fields})


@pytest.fixture(scope="module", params=[1, 2], ids=["one API process", "two"])
def small(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Serving]:
    options = ("--max-model-length", "2048", "--kv-cache-memory", "64MiB", "--api-processes", str(request.param))
    with serving(tmp_path_factory.mktemp("hostile"), *options, command=REAL, model=str(small_model)) as server:
        server.wait_status("/ready", 200, seconds=240)
        yield server


@pytest.mark.slow
def test_no_grammar_ends_or_stalls_the_server_or_the_engine(small: Serving) -> None:
    engines = children(small.process.pid, b"engine.process")
    assert engines
    for case, (path, fields, status) in HOSTILE.items():
        response = ask(small, path, fields)
        if case == BUSY and response.status_code == 503:
            assert response.json()["error"]["code"] == "grammars_unavailable", response.text
            assert response.headers["retry-after"]
            continue
        assert response.status_code == status, (case, response.text)
        if status == 400:
            error = response.json()["error"]
            assert error["param"] in ("tools", *fields), case
            assert error["message"].startswith(f"{error['param']}: "), case
        else:
            assert "abort" not in response.text, case
        assert ask(small, "completions", {"guided_regex": "[a-c]{2}", "prompt": case}).status_code == 200
    assert children(small.process.pid, b"engine.process") == engines
    assert small.process.poll() is None


@pytest.mark.slow
def test_a_generation_that_its_grammar_ends_is_an_error_and_never_an_abort(small: Serving) -> None:
    """Its rehearsal cannot know: only one of a thousand beginnings leads to what takes too much."""
    (token,) = small.post("/tokenize", {"prompt": "b", "add_special_tokens": False}).json()["tokens"]
    fields = {"guided_regex": "(b){100000}c|[a-z]{1,3}", "prompt": "x", "temperature": 0, "max_tokens": 8}
    assert small.post("/v1/completions", fields).status_code == 200
    fields["logit_bias"] = {str(token): 100}
    response = small.post("/v1/completions", fields)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_too_complex"), response.text
    stream = small.post("/v1/completions", {**fields, "stream": True})
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "grammar_too_complex"
    assert not any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])


def children(pid: int, name: bytes) -> list[int]:
    """Return the children of a process with a name in their command."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if name in _command(child)]


def rehearsing(server: Serving) -> list[int]:
    """Return the processes of a server that rehearse grammars, without their forks."""
    return children(server.process.pid, b"checker_process")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_process_that_rehearses_is_started_by_the_first_grammar_and_ends_with_the_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    with serving(tmp_path) as server:
        server.wait_status("/ready", 200)
        assert server.post("/v1/chat/completions", {"messages": messages_for("a")}).status_code == 200
        assert not rehearsing(server), "a server without grammars does not need it"
        assert server.post("/v1/completions", {"prompt": "a", "guided_regex": "["}).status_code == 400
        (pid,) = rehearsing(server)
        server.signal(number)
        server.wait_exit()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or b"checker" not in _command(pid), "it has ended")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_process_that_rehearses_is_replaced_and_its_memory_is_small(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_status("/ready", 200)
        for pattern in ("(", ")", "[", "a{"):
            assert server.post("/v1/completions", {"prompt": "a", "guided_regex": pattern}).status_code == 400
            (pid,) = rehearsing(server)
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            assert resident < 80 << 20
            os.kill(pid, signal.SIGKILL)
