"""Programs built from pinned Go modules, once, into the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.caches import cache_folder
from cluster.commands import print_to_stderr
from cluster.programs import Say


@dataclass(frozen=True)
class GoTool:
    """A program: its name, its main package and the module's version."""

    name: str
    package: str
    version: str


# An S3 server over a folder, for models from an object store.
VERSITYGW = GoTool("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0")


def ensure_tool(tool: GoTool, say: Say) -> Path:
    """Return the program's path. Building it the first time takes minutes.

    Raises RuntimeError with the end of the build's output if the build fails.
    """
    folder = tools_folder(os.environ)
    target = folder / f"{tool.name}-{tool.version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            say(f"building {tool.name} {tool.version} from its Go module (minutes the first time)")
            _build(tool, target)
    return target


def tools_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the built programs."""
    return cache_folder("tools", environment)


def _build(tool: GoTool, target: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise RuntimeError(f"go: not found; install Go 1.24 or later, with which {tool.name} is built with")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        done = subprocess.run(
            [go, "install", "-trimpath", f"{tool.package}@{tool.version}"],
            env={**os.environ, "GOBIN": folder, "CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{tool.name} could not be built: {done.stderr[-2000:]}")
        (Path(folder) / tool.name).rename(target)


if __name__ == "__main__":
    try:
        ensure_tool(VERSITYGW, print_to_stderr)
    except RuntimeError as failure:
        sys.exit(f"error: {failure}")
