"""Runs `fastgen fetch` as a separate process, as in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.waiting import HANG_SECONDS

_EACH = """
import contextlib, io, json, sys
from fastgen.commands.main import main
ended = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as output:
        code = main(["fetch", *arguments])
    ended.append((code, output.getvalue()))
assert "torch" not in sys.modules
print(json.dumps(ended))
"""
_OWN = ("HF_", "HUGGING", "AWS_")


@dataclass(frozen=True)
class Ended:
    """Result of a process; `last` is its last line of output, which Kubernetes reports."""

    code: int
    output: str

    @property
    def last(self) -> str:
        return self.output.strip().splitlines()[-1]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of hubs and object stores."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
    return kept | {"NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"} | more


def start(*arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fastgen", "fetch", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(**more), stderr=subprocess.PIPE, text=True)


def fetch(*arguments: str | Path, **more: str) -> Ended:
    """Run it to its end; keywords are environment variables."""
    process = start(*arguments, **more)
    _, output = process.communicate(timeout=HANG_SECONDS)
    return Ended(process.returncode, output)


def fetch_each(commands: Sequence[Sequence[str]], **more: str) -> list[Ended]:
    """Run several in one process, because the imports take longer than the downloads."""
    done = subprocess.run(
        [sys.executable, "-c", _EACH, json.dumps(commands)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    return [Ended(code, output) for code, output in json.loads(done.stdout)]


def marker(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / ".fastgen" / "complete.json").read_text())
    return found


def names(folder: Path) -> list[str]:
    """Return the model's files, without the records."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".fastgen")
