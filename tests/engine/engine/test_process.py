"""The engine process's loop, over an engine and a channel that note what they are asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fastgen.core.request import Request
from fastgen.engine import build
from fastgen.engine.channel import Channel, Recipients, Unreadable
from fastgen.engine.process import serve_channel
from fastgen.link.messages import Add, Command, Event, Gone, Ready, Shutdown, StepReport, TokenOutput
from fastgen.settings import EngineConfig
from support.demo_weights import demo_model


class NotedEngine:
    """An engine without work."""

    has_work = is_watched = False

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def add(self, request: Request) -> None:
        self._notes.append(f"add {request.id}")

    def cancel(self, request_id: str) -> bool:
        self._notes.append(f"cancel {request_id}")
        return True

    def report(self, outputs: list[TokenOutput]) -> None:
        """Return no report."""
        self._notes.extend(f"report {output.request_id} {output.finish_reason}" for output in outputs)

    def prepare_grammars(self) -> None:
        self._notes.append("prepare grammars")

    def check_integrity(self) -> None:
        self._notes.append("check integrity")


class NotedChannel:
    """A channel that returns the given lists of commands in turn, and notes what it is asked and told."""

    def __init__(self, notes: list[str], commands: list[list[tuple[int, Command | Unreadable]]]) -> None:
        self._notes, self._commands = notes, commands
        self.clients = Recipients(2)

    def send(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._notes.append("ready")

    def receive(self, *, wait: float | None) -> list[tuple[int, Command | Unreadable]]:
        self._notes.append(f"wait {wait}")
        return self._commands.pop(0)

    def leave(self, client: int) -> list[str]:
        return self.clients.leave(client)

    def report(self, _report: StepReport) -> None:
        """Send nothing."""


def run(monkeypatch: pytest.MonkeyPatch, *commands: list[tuple[int, Command | Unreadable]]) -> list[str]:
    """Return what the loop asked of its engine and its channel until it was told to end."""
    notes: list[str] = []
    loaded = SimpleNamespace(engine=NotedEngine(notes), info=cast(Any, None))
    monkeypatch.setattr(build, "build_engine", lambda *_given, **_named: loaded)
    channel = NotedChannel(notes, [*commands, [(0, Shutdown())]])
    serve_channel(cast(Channel, channel), EngineConfig(model=str(demo_model())))
    return notes


def test_grammars_are_prepared_at_once_and_invariants_checked_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first grammar under load would otherwise delay every running request."""
    notes = run(monkeypatch, [])
    assert notes == ["ready", "prepare grammars", "wait 1.0", "check integrity", "wait None"]


def test_the_requests_of_a_client_that_has_gone_end(monkeypatch: pytest.MonkeyPatch) -> None:
    early, late, other = (Add(Request(id=name, prompt_token_ids=[1])) for name in ("early", "late", "other"))
    notes = run(monkeypatch, [(1, early)], [(0, Gone(1)), (0, other), (1, late)])
    assert [note for note in notes if note.startswith(("add", "cancel"))] == ["add early", "cancel early", "add other"]


def test_a_request_that_cannot_be_read_is_reported_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(Recipients, "open", lambda _self, request_id, client: opened.append((request_id, client)))
    notes = run(monkeypatch, [(1, Unreadable("no integer", "a")), (0, Unreadable("no message", None))])
    assert [note for note in notes if note.startswith("report")] == ["report a rejected"]
    assert opened == [("a", 1)]


def test_the_end_of_an_unknown_client_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Add(Request(id="other", prompt_token_ids=[1]))
    assert "add other" in run(monkeypatch, [(0, Gone(1)), (0, Gone(1)), (0, Gone(7)), (0, other)])
