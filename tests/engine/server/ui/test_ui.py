"""`fastgen serve --ui`: access to the page and to the stream of steps, and the events of the stream."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.conftest import scripted as scripted
from engine.server.serving import Serving, serving
from fastgen.commands import main
from support.waiting import HANG_SECONDS, wait_until

KEY = {"Authorization": "Bearer sk-of-the-page"}
SECRET = "marmalade"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("ui")
    environment = {
        "FASTGEN_API_KEY": "sk-of-the-page",
        "SCRIPT_STEP_SECONDS": "0.005",
        "SCRIPT_END": str(folder / "end"),
    }
    with serving(folder, "--ui", "--max-model-length", "2048", environment=environment) as server:
        server.wait_status("/ready", 200)
        yield server


@contextmanager
def watching(server: Serving) -> Iterator[Iterator[dict[str, Any]]]:
    with httpx.stream("GET", f"{server.url}/ui/steps", headers=KEY, timeout=HANG_SECONDS) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def complete(server: Serving, prompt: str, max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    assert server.request("POST", "/v1/completions", json=body, headers=KEY).status_code == 200


@contextmanager
def until_seen(server: Serving) -> Iterator[None]:
    """Run a request until the end of the context, or 1700 steps."""
    end = server.log_path.with_name("end")
    body = {"prompt": "one two three " * 100, "max_tokens": 1700}
    request = threading.Thread(
        target=server.request, args=("POST", "/v1/completions"), kwargs={"json": body, "headers": KEY}
    )
    request.start()
    try:
        yield
    finally:
        end.touch()
        request.join()
        end.unlink()


def test_without_the_flag_there_is_no_page(scripted: Serving) -> None:
    for path in ("/", "/ui", "/ui/steps"):
        assert scripted.status(path) == 404


def test_the_page_needs_no_key_and_the_steps_do(server: Serving) -> None:
    assert server.get("/").headers["location"] == "ui"
    for path in ("/ui", "/ui/page.css", "/ui/api.js", "/ui/steps.js", "/ui/playground.js"):
        response = server.get(path)
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "://" not in response.text, "no external assets"
    assert server.status("/ui/steps") == 401
    assert server.get("/ui/steps", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert server.status("/v1/models") == 401


def test_the_steps_tell_ids_and_counts_but_no_texts(server: Serving) -> None:
    with watching(server) as events:
        limits = next(events)
        assert limits["token_budget"] == 256
        assert next(events)["steps"] == []  # the state when the watch began
        thread = threading.Thread(target=complete, args=(server, f"{SECRET} " * 250, 4))
        thread.start()
        seen: list[dict[str, Any]] = []
        while sum(bool(step["decodes"]) for event in seen for step in event["steps"]) < 3:
            seen.append(next(events))
        thread.join()
        # On a busy machine, one event may tell all steps of a short request, and the state after its end.
        with until_seen(server):
            while not next(events)["blocks"]:
                pass
    steps = [step for event in seen for step in event["steps"]]
    prompt_tokens = [tokens for step in steps for _, tokens in step["prompts"]]
    assert len(prompt_tokens) > 1, "the prompt is split over steps"
    assert max(prompt_tokens) <= 256
    assert sum(prompt_tokens) >= 500
    owners = {owner for step in steps for owner, _ in step["prompts"]}
    assert len(owners) == 1
    assert [step["decodes"] for step in steps if step["decodes"]] == [list(owners)] * 3
    told = json.dumps(seen)
    assert SECRET not in told
    assert set(steps[0]) == {"number", "seconds", "decodes", "prompts", "preemptions"}
    assert set(seen[0]) == {"steps", "dropped", "state", "queue", "blocks"}


def test_top_shows_the_steps(
    server: Serving, scripted: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ["--once", "--interval", "0.5"]
    monkeypatch.setenv("FASTGEN_API_KEY", "sk-of-the-page")
    with until_seen(server):
        wait_until(lambda: server.metric("fastgen_num_requests_running"), "the request runs")
        assert main.main(["top", server.url, *once]) == 0
    said = capsys.readouterr().out
    assert "decode █ prompt ▒" in said
    assert "1 + 0 of 0 prompts" in said
    assert main.main(["top", scripted.url, *once]) == 0
    assert "steps: start the server with --ui" in capsys.readouterr().out
    monkeypatch.setenv("FASTGEN_API_KEY", "wrong")
    assert main.main(["top", server.url, *once]) == 1
    assert "401 the API key is not valid" in capsys.readouterr().err


def test_a_server_with_a_watcher_stops_at_once(tmp_path: Path) -> None:
    options = ("--ui", "--drain-seconds", "3600")
    with serving(tmp_path, *options, environment={"FASTGEN_API_KEY": "sk-of-the-page"}) as other:
        other.wait_status("/ready", 200)
        with watching(other) as events:
            next(events)
            other.signal(signal.SIGTERM)
            assert other.wait_exit() == 0
            assert [event for event in events if event["steps"]] == []
