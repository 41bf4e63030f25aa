"""docs/troubleshooting.md quotes messages, codes and statuses of the engine, docs/limits.md its bounds."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import fastgen
from fastgen import exit_codes
from fastgen.server import openapi
from fastgen.server.http.json_census import MOST_ITEMS, MOST_NODES
from fastgen.server.serving.held_memory import MOST_LOGPROBS_HELD
from fastgen.settings import SERVER_SETTINGS

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "troubleshooting.md").read_text()
LIMITS = (DOCS / "limits.md").read_text()
MIB = 1 << 20


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def messages() -> Iterator[str]:
    """Yield the string literals of the engine; in formatted ones, values are `…`."""
    for path in Path(fastgen.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield "".join(str(part) for part in parts)


def test_each_quoted_message_is_one_of_the_engine() -> None:
    killed = exit_codes.how_ended(-9)
    known = [
        *messages(),
        os.strerror(errno.EADDRINUSE),
        f"the engine process {killed}",
        f"rank …: its process {killed}",
        *(f"rank …: {text}" for text in messages() if text.startswith("its process")),
    ]
    quoted = re.findall(r"^\| `([^`]+)` \|", section("It does not start"), re.MULTILINE)
    quoted += re.findall(r"^\| 400, `([^`]+)` \|", section("Requests fail"), re.MULTILINE)
    assert len(quoted) > 8
    for message in quoted:
        assert any(message in text for text in known), message


def test_the_exit_codes_are_those_of_the_server() -> None:
    shown = re.findall(r"^\| (\d) \|", section("It does not start"), re.MULTILINE)
    codes = {exit_codes.FAILED, exit_codes.BAD_CONFIGURATION, exit_codes.DEVICE_FAILED, exit_codes.HUNG}
    assert sorted(map(int, shown)) == sorted(codes)


def test_the_statuses_are_those_of_the_api() -> None:
    rows = re.findall(r"^\| (\d{3}[\d, ]*)([^|]*)", section("Requests fail"), re.MULTILINE)
    cells = [statuses for statuses, where in rows if "at the gateway" not in where]  # it has others
    assert {status for cell in cells for status in re.findall(r"\d{3}", cell)} == openapi._ERRORS.keys()


def test_the_bounds_on_requests_are_those_of_the_server() -> None:
    shown = {
        flag: default
        for default, flag in re.findall(r"\| ([^|]*?) \(`(--[a-z-]+)`\) \|", LIMITS.partition("\n## Requests\n")[2])
    }
    settings = {setting.flag: setting.default for setting in SERVER_SETTINGS}
    del shown["--max-model-length"]
    for flag, default in shown.items():
        value = settings[flag]
        assert isinstance(value, int)
        assert default in (f"{value // MIB} MiB", f"{value:,}", f"{value} s"), flag
    assert len(shown) == 4
    assert f"| {MOST_NODES:,}; {MOST_ITEMS:,} | 400 |" in LIMITS
    assert f"| {MOST_LOGPROBS_HELD:,} | 400 |" in LIMITS
