"""Running other programs to their end, and saying clearly why one failed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandError(subprocess.CalledProcessError):
    """A program that ended with a status other than 0. Its text holds what the program wrote to stderr."""

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
    """Runs a program and returns what it wrote to stdout.

    `timeout` is in seconds. Raises CommandError where the program fails, FileNotFoundError where it does not
    exist and subprocess.TimeoutExpired where it takes longer.
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
    """Says one line of progress where it does not mix with a command's result."""
    print(line, file=sys.stderr, flush=True)
