"""Compare servers or engines on this machine: `python benchmarks/serving/compare.py CONTENDERS.toml [--rounds 5]`.

A machine's speed varies from hour to hour, so contenders run in turn, in alternating order per round. The result is the
ratio to the first contender within each round: its median and range over the rounds. The machine rests between runs,
because it may still be freeing the memory of the previous one.

A contender is a command whose last line of output is the JSON of `fastgen bench --json`. Its server, if any, is started
before the command and stopped after it. All flags except --rounds are passed to every contender.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = {
    "tokens/s": ("total_tokens_per_second",),
    "first token p50 ms": ("time_to_first_token_ms", "p50"),
    "first token p95 ms": ("time_to_first_token_ms", "p95"),
    "gap p50 ms": ("inter_token_latency_ms", "p50"),
    "gap p99 ms": ("inter_token_latency_ms", "p99"),
    "gap max ms": ("inter_token_latency_ms", "max"),
}
READY_TIMEOUT_SECONDS = 600
REST_SECONDS = 10


@contextlib.contextmanager
def server(contender: dict[str, Any]) -> Iterator[None]:
    """Run the contender's server, if it has one, and wait until it is ready."""
    if "server" not in contender:
        yield
        return
    environment = {**os.environ, **contender.get("environment", {})}
    with Path(contender.get("log", os.devnull)).open("w") as log:
        command = shlex.split(contender["server"])
        process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_ready(contender["ready"], process)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which `wait_ready` reports
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # its figures are known and must not be lost
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `url` responds with 200."""
    end = time.monotonic() + READY_TIMEOUT_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"the server exited with code {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    sys.exit(f"{url} did not respond with 200 within {READY_TIMEOUT_SECONDS} s")


def measure(contender: dict[str, Any], flags: list[str], seed: int) -> dict[str, Any]:
    """Run one contender and return its figures."""
    command = [*shlex.split(contender["run"]), *flags, "--seed", str(seed)]
    environment = {**os.environ, **contender.get("environment", {})}
    time.sleep(REST_SECONDS)
    with server(contender):
        done = subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert not result["failed"], f"{result['failed']} requests failed"
    return {figure: reduce(getitem, path, result) for figure, path in FIGURES.items()}


def table(rounds: list[list[dict[str, Any]]], names: list[str]) -> str:
    """Return the medians and the ratios to the first contender as a Markdown table."""
    lines = ["| | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for place, name in enumerate(names):
        medians = [statistics.median(r[place][figure] for r in rounds) for figure in FIGURES]
        lines.append(f"| {name} | " + " | ".join(f"{value:g}" for value in medians) + " |")
    for place, name in enumerate(names[1:], 1):
        cells = []
        for figure in FIGURES:
            ratios = sorted(r[place][figure] / r[0][figure] for r in rounds)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append(f"| {name} : {names[0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the contenders in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    contenders = tomllib.loads(options.contenders.read_text())
    rounds = []
    for number in range(options.rounds):
        results = {}
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            results[name] = measure(contenders[name], flags, number)
            print(f"round {number + 1}: {name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
        rounds.append([results[name] for name in contenders])
    print(table(rounds, list(contenders)))


if __name__ == "__main__":
    main()
