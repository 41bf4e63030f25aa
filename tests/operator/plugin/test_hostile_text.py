"""Text of the cluster, such as logs and messages, commands neither the terminal nor the browser of its reader."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from io import StringIO
from typing import Any, cast

import pytest

from fastgen_operator.kube.transport import KubeError
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin import main as program
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.commands import logs, status, top
from fastgen_operator.plugin.pages import fleet_page, page, resource_page
from fastgen_operator.plugin.screen import Screen
from support.namespace import Object

NOW = datetime(2026, 1, 2, tzinfo=UTC)
START = "2026-01-01T00:00:00Z"
# A title of the window, cleared screens (7 and 8 bits), a bell, a carriage return, a hidden colour, text from right to
# left, a zero-width character, and markup.
HOSTILE = "\x1b]0;t\x07 \x1b[2J \x9b2J \r\b\x7f \x1b[8mx \x1b[31mred \u202egnp\u200b <script>alert(1)</script>\"'&"
# What may be left in the output: the colours of the program itself, each line ended by a reset.
COLOUR = re.compile("\x1b\\[(?:0|1|2|31|32|33|36)m")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def hostile(value: Any, *, keep: frozenset[str] = frozenset({"type", "status", "state"})) -> Any:
    """Return the value with the hostile text at the end of each text in it, except times and some fields."""
    match value:
        case dict():
            return {name: each if name in keep else hostile(each) for name, each in value.items()}
        case list():
            return [hostile(each) for each in value]
        case str() if value != START:
            return value + HOSTILE
    return value


def chat() -> Object:
    condition = {"type": "Ready", "status": "False", "reason": "Crash", "message": "m", "lastTransitionTime": START}
    change = {"time": START, "fromReplicas": 1, "toReplicas": 3, "reason": "DemandGrew", "message": "grew"}
    found: Object = hostile(
        {
            "metadata": {"name": "chat", "namespace": "space", "creationTimestamp": START, "generation": 1},
            "spec": {"model": {"source": "hf://a/b"}},
        }
    )
    told = {"autoscaling": {"message": "m", "history": [change]}, "url": "http://chat", "observedGeneration": 1}
    conditions = [{**hostile(condition), "type": kind} for kind in ("Ready", "Available")]
    return {**found, "status": {**hostile(told), "conditions": conditions}}


def pod() -> Pod:
    found: Object = hostile(
        {
            "metadata": {"name": "chat-1", "namespace": "space", "creationTimestamp": START},
            "spec": {"nodeName": "node"},
            "status": {"phase": "Running", "reason": "r", "message": "m", "conditions": []},
        }
    )
    return Pod(found)


def is_harmless(text: str) -> bool:
    plain = COLOUR.sub("", text)
    return all(character == "\n" or character.isprintable() for character in plain)


def test_the_screens_of_a_terminal_contain_no_command_but_colours() -> None:
    found = status.overview_of(chat(), [pod()], NOW)
    for lines in (
        lambda screen: status.one_screen(found, screen, NOW),
        lambda screen: status.fleet_table([found], screen, NOW),
        lambda screen: top.view(HOSTILE, [pod()], {f"chat-1{HOSTILE}": HOSTILE}, None, screen),
    ):
        terminal = Terminal()
        screen = Screen(terminal, {})
        screen.write(lines(screen))
        text = terminal.getvalue()
        assert "script" in text, "the text itself is shown"
        assert is_harmless(text)
        for line in text.splitlines():
            codes = COLOUR.findall(line)
            assert not codes or codes[-1] == "\x1b[0m", "a colour does not reach the next line"
        without = StringIO()
        Screen(without).write(lines(Screen(without)))
        assert "\x1b" not in without.getvalue()


class Pods:
    """A cluster with one pod, whose log is hostile, or fails with hostile words."""

    namespace = "space"

    def __init__(self, lines: list[str], error: Exception | None = None) -> None:
        self.lines, self.error = lines, error

    def resource(self, _: str) -> Object:
        return {}

    def pods_and_canary(self, _: str) -> list[Pod]:
        return [pod()]

    def log(self, *_: object) -> Iterator[str]:
        if self.error is not None:
            raise self.error
        yield from self.lines


def show_logs(pods: Pods, stream: StringIO) -> int:
    options = argparse.Namespace(name="chat", follow=False, previous=False, container="engine", tail=None)
    options.timestamps = False
    return logs.run(options, cast(Cluster, pods), Screen(stream, {}))


@pytest.mark.parametrize("stream", [StringIO, Terminal])
def test_logs_are_printed_without_commands_to_the_terminal(
    stream: type[StringIO], capsys: pytest.CaptureFixture[str]
) -> None:
    written = stream()
    assert show_logs(Pods([HOSTILE, "\ttabbed"]), written) == 0
    assert "alert(1)" in written.getvalue()
    assert is_harmless(written.getvalue())
    assert len(written.getvalue().splitlines()) == 2
    for error in (KubeError(400, HOSTILE), PluginError(HOSTILE)):
        assert show_logs(Pods([], error), stream()) == 1
        assert is_harmless(capsys.readouterr().err)


def test_errors_are_one_harmless_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def resource(self, _: str) -> Object:
            raise PluginError(f"the API server said: {HOSTILE}\nsecond line")

    monkeypatch.setattr("fastgen_operator.plugin.cluster.open_cluster", lambda **_: Broken())
    assert program.main(["status", "chat"]) == 1
    words = capsys.readouterr().err
    assert is_harmless(words)
    assert words.count("\n") == 1


def test_json_is_unchanged() -> None:
    written = Terminal()
    Screen(written, {}).write_json({"message": HOSTILE})
    assert json.loads(written.getvalue())["message"].replace("\x7f", " ") == HOSTILE.replace("\x7f", " ")
    assert "\x1b" not in written.getvalue()


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_the_pages_of_the_dashboard_show_text_as_text() -> None:
    found = status.overview_of(chat(), [pod()], NOW)
    plain = Elements(page("title", "", "nonce"))
    for text in (
        fleet_page([found], NOW, "nonce"),
        resource_page(found, NOW, "nonce"),
        page(HOSTILE, "", "nonce"),
    ):
        assert "alert(1)" in text
        elements = Elements(text)
        assert elements.tags.count("script") == plain.tags.count("script") == 1
        handlers = [name for name, _ in elements.attributes if name.startswith("on")]
        assert handlers == []
        shown = text.replace(page.__module__, "")
        assert all(character in "\n\t" or character.isprintable() for character in shown)
