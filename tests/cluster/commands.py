"""Runs other programs to completion and reports their failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandError(subprocess.CalledProcessError):
    """A program exited with a non-zero status. The message includes its stderr."""

    def __str__(self) -> str:
        words = " ".join(str(word) for word in self.cmd)
        return f"{words}: status {self.returncode}\n{(self.stderr or self.stdout or '').strip()}"


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = 600.0,
) -> str:
    """Run a program and return its stdout.

    `timeout` is in seconds. Raises CommandError if the program fails, FileNotFoundError if it does not exist and
    subprocess.TimeoutExpired if it takes longer.
    """
    words = [str(word) for word in argv]
    done = subprocess.run(
        words,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise CommandError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


def print_to_stderr(line: str) -> None:
    """Print a progress line to stderr, which keeps it apart from a command's result."""
    print(line, file=sys.stderr, flush=True)
