"""Which logs `kubectl fastgen logs --follow` reads. Needs no cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from io import StringIO
from typing import Any, cast

import pytest

from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.commands import logs
from fastgen_operator.plugin.screen import Screen
from harness.objects import container, pod

STARTED = {"startedAt": "2026-01-01T00:00:00Z"}
CRASH = {"terminated": {"exitCode": 1, **STARTED, "finishedAt": "2026-01-01T00:00:09Z"}}
CREATING: dict[str, Any] = {"state": {"waiting": {"reason": "ContainerCreating"}}}
RUNNING: dict[str, Any] = {"state": {"running": STARTED}}
BACKOFF: dict[str, Any] = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": CRASH}


class Polls:
    """The cluster as the command polls it: one state of its pod each time, then the user presses Ctrl-C."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = iter(states)

    def resource(self, _: str) -> None:
        pass

    def pods_and_canary(self, _: str) -> list[Pod]:
        for state in self.states:
            return [Pod(pod(**container(**state)))]
        raise KeyboardInterrupt

    def log(self, pod: Pod, _: object) -> Iterator[str]:
        yield f"start {pod.engine.restarts}"


@pytest.mark.parametrize(
    ("states", "lines"),
    [
        ([CREATING, CREATING], []),
        ([RUNNING, RUNNING], ["start 0"]),
        ([{"state": CRASH}, {"state": CRASH}], ["start 0"]),
        ([{**BACKOFF, "restarts": 3}, {**BACKOFF, "restarts": 3}], ["start 3"]),
        ([RUNNING, {"state": CRASH}, BACKOFF, {**RUNNING, "restarts": 1, "lastState": CRASH}], ["start 0", "start 1"]),
    ],
    ids=["not started", "running", "ended", "in backoff", "started again"],
)
def test_each_start_of_a_container_is_followed_once_also_while_it_waits_to_restart(
    states: list[dict[str, Any]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_POLL_SECONDS", 0.05)
    options = argparse.Namespace(name="chat", follow=True, previous=False, container="engine", tail=None)
    options.timestamps = False
    written = StringIO()
    with pytest.raises(KeyboardInterrupt):
        logs.run(options, cast(Cluster, Polls(*states)), Screen(written, {}))
    assert written.getvalue().splitlines() == [f"[chat-new-x] {line}" for line in lines]


class Breaking(Polls):
    """Its pods have a log of some lines, and then the connection fails."""

    def __init__(self, lines: int) -> None:
        super().__init__(RUNNING)
        self.lines = lines

    def log(self, pod: Pod, _: object) -> Iterator[str]:
        yield from (f"{pod.name} line {n}" for n in range(self.lines))
        raise PluginError("the connection failed: timed out")


@pytest.mark.parametrize(("lines", "words"), [(0, "the log cannot be read"), (2, "the log breaks off here")])
def test_an_error_says_whether_the_log_was_read_in_part(
    lines: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    logs.add_arguments(parser)
    stream = StringIO()
    assert logs.run(parser.parse_args(["chat"]), cast(Cluster, Breaking(lines)), Screen(stream, {})) == 1
    assert len(stream.getvalue().splitlines()) == lines
    assert capsys.readouterr().err == f"[chat-new-x] {words}: the connection failed: timed out\n"
