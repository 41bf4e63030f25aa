"""Contenders: engines that run in turn on this machine, and tables of what was measured.

A machine's speed varies from hour to hour, so contenders run in turn, in alternating order per round, and ratios are
taken within each round. The machine rests between runs, because it may still be freeing the memory of the previous one.

A contender is a table of a TOML file. `$NAME` in its strings is replaced from the environment.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
READY_TIMEOUT_SECONDS: Final = 600
REST_SECONDS: Final = 5
_SAMPLE_SECONDS: Final = 1.0

Contender = Mapping[str, Any]
Figures = dict[str, float]


class ContenderError(Exception):
    """A contender that is missing, or that failed; the message is the reason."""


@dataclass(slots=True)
class Outcome:
    """What is known of one contender.

    Attributes:
        rounds: figures by name, for each round.
        reason: why it has none.
    """

    rounds: list[Figures]
    reason: str | None = None


class Memory(threading.Thread):
    """The most memory that the processes of a session had at once, with each page divided among those that map it."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self._session, self._end = session, threading.Event()
        self.start()

    def run(self) -> None:
        """Sample until the end."""
        while True:
            self.most_bytes = max(self.most_bytes, resident_bytes(self._session))
            if self._end.wait(_SAMPLE_SECONDS):
                return

    def stop(self) -> int:
        """Sample once more, and return the most."""
        self._end.set()
        self.join()
        return max(self.most_bytes, resident_bytes(self._session))


def resident_bytes(session: int) -> int:
    """Return the proportional set size of all processes of a session, file mappings included."""
    total = 0
    for folder, _ in _processes(session):
        with contextlib.suppress(OSError):  # it has ended
            for line in (folder / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def processor_seconds(session: int) -> float:
    """Return the processor time of all processes of a session, in user mode and in the kernel."""
    ticks = sum(int(stat[11]) + int(stat[12]) for _, stat in _processes(session))
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes(session: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder of each process of a session, and the fields of its stat that follow its name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield folder, fields


def expand(value: Any) -> Any:
    """Return a value of TOML with variables of the environment in its strings replaced.

    Raises:
        ContenderError: a variable is not set.
    """
    if isinstance(value, str):
        expanded = os.path.expandvars(value)
        if "$" in expanded:
            raise ContenderError(f"not present: a variable of the environment is not set: {expanded}")
        return expanded
    if isinstance(value, dict):
        return {name: expand(each) for name, each in value.items()}
    return value


@contextlib.contextmanager
def process(command: str, contender: Contender, stdout: Any, stderr: Any = None) -> Iterator[subprocess.Popen[str]]:
    """Run a command of a contender in this folder, in a session of its own, and end it afterwards.

    Raises:
        ContenderError: there is no such program.
    """
    environment = {**os.environ, **contender.get("environment", {})}
    arguments = shlex.split(command)
    try:
        started = subprocess.Popen(
            arguments, cwd=HERE, env=environment, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )
    except OSError as error:
        raise ContenderError(f"not present: {Path(arguments[0]).name}: {error.strerror}") from error
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:  # its figures are known and must not be lost
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@contextlib.contextmanager
def server(contender: Contender) -> Iterator[int | None]:
    """Run the contender's server, if it has one, until it is ready; yield its session.

    Raises:
        ContenderError: it is not present, ends, or does not become ready.
    """
    if "server" not in contender:
        yield None
        return
    with (
        Path(contender.get("log", os.devnull)).open("w") as log,
        process(contender["server"], contender, log, log) as started,
    ):
        wait_ready(contender["ready"], started)
        yield started.pid


def wait_ready(url: str, started: subprocess.Popen[str]) -> None:
    """Wait until `url` responds with 200.

    Raises:
        ContenderError: the process ends first, or it takes too long.
    """
    end = time.monotonic() + READY_TIMEOUT_SECONDS
    while time.monotonic() < end:
        if started.poll() is not None:
            raise ContenderError(f"the server exited with code {started.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise ContenderError(f"{url} did not respond with 200 within {READY_TIMEOUT_SECONDS} s")


def in_turn(
    contenders: Mapping[str, Contender], rounds: int, measure: Callable[[str, Contender, int], Figures]
) -> dict[str, Outcome]:
    """Measure each contender once a round, in alternating order. One that fails is left out of the further rounds."""
    outcomes = {name: Outcome([]) for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            outcome = outcomes[name]
            if outcome.reason is not None:
                continue
            time.sleep(REST_SECONDS)
            try:
                outcome.rounds.append(measure(name, expand(dict(contenders[name])), number))
            except ContenderError as error:
                outcomes[name] = Outcome([], str(error))
            shown = outcomes[name].reason or json.dumps(outcome.rounds[-1])
            print(f"round {number + 1}: {name}: {shown}", file=sys.stderr, flush=True)
    return outcomes


def medians(outcomes: Mapping[str, Outcome], figures: Sequence[str]) -> str:
    """Return each contender's medians as a Markdown table. One without figures has a row with the reason."""
    lines = ["| | " + " | ".join(figures) + " |", "|---" + "|---:" * len(figures) + "|"]
    for name, outcome in outcomes.items():
        if outcome.reason is not None:
            lines.append(f"| {name}: {outcome.reason.replace('|', '/')} |" + " – |" * len(figures))
            continue
        cells = (f"{statistics.median(found[figure] for found in outcome.rounds):.4g}" for figure in figures)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(outcomes: Mapping[str, Outcome], pairs: Sequence[tuple[str, str]], figures: Sequence[str]) -> str:
    """Return a Markdown table of the ratio of each pair of contenders: median and range over the rounds.

    A pair of which one has no figures has no row; without rows there is no table.
    """
    lines = ["| | " + " | ".join(figures) + " |", "|---" + "|---:" * len(figures) + "|"]
    for one, other in pairs:
        rounds = list(zip(outcomes[one].rounds, outcomes[other].rounds, strict=False))
        cells = []
        for figure in figures if rounds else ():
            found = sorted(ours[figure] / theirs[figure] if theirs[figure] else math.nan for ours, theirs in rounds)
            spread = f" ({found[0]:.2f} to {found[-1]:.2f})" if len(found) > 1 else ""
            cells.append(f"{statistics.median(found):.2f}{spread}")
        if cells:
            lines.append(f"| {one} : {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""
