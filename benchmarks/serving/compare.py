"""Compare servers or engines on this machine: `python -m benchmarks.serving.compare CONTENDERS.toml [--rounds 5]`.

A contender is a command whose last line of output is the JSON of `fastgen bench --json`. Its server, if any, is started
before the command and stopped after it. All flags except --rounds are passed to every contender. Ratios are those to
the first contender.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import tomllib
import urllib.request
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final

from benchmarks.serving.contenders import (
    Contender,
    ContenderError,
    Figures,
    Memory,
    in_turn,
    medians,
    process,
    processor_seconds,
    ratios,
    server,
)
from fastgen.api_client.metrics import Interval, Scrape
from fastgen.bench.workload import Workload

_PATHS: Final = {
    "tokens/s": ("total_tokens_per_second",),
    "first token p50 ms": ("time_to_first_token_ms", "p50"),
    "first token p95 ms": ("time_to_first_token_ms", "p95"),
    "gap p50 ms": ("inter_token_latency_ms", "p50"),
    "gap p99 ms": ("inter_token_latency_ms", "p99"),
    "gap max ms": ("inter_token_latency_ms", "max"),
}
FIGURES: Final = (*_PATHS, "memory MiB")
# Of servers: independent of other load on the machine, if threads do not wait for each other.
PROCESSOR: Final = "tokens per processor second"
# Parts of the mean time to a first token, of servers with FastGen's metrics.
PARTS: Final = ("queue ms", "prompt steps ms", "HTTP and client ms", "first token mean ms")


def measure(contender: Contender, flags: list[str], seed: int) -> Figures:
    """Run one contender and return its figures.

    Raises:
        ContenderError: it is not present, or failed.
    """
    command = " ".join([contender["run"], *flags, "--seed", str(seed)])
    metrics = contender.get("metrics")
    with server(contender) as session, process(command, contender, subprocess.PIPE) as running:
        memory = Memory(session if session is not None else running.pid)
        began = processor_seconds(session) if session is not None else 0.0
        before = _after_warm_up(metrics, running) if metrics else None
        output, _ = running.communicate()
        most = memory.stop()
        worked = processor_seconds(session) - began if session is not None else 0.0
        after = _scrape(metrics) if metrics else None
    if running.returncode or not output.strip():
        raise ContenderError(f"its command ended with code {running.returncode}")
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    if result["failed"]:
        raise ContenderError(f"{result['failed']} of its requests failed")
    figures = figures_of(result, most)
    if worked:
        # The load's request to warm up is worked on, but not counted.
        warm_up = Workload(**result["workload"]).warm_up()
        tokens = (
            result["prompt_tokens"] + result["generated_tokens"] + warm_up.prompt_tokens + warm_up.generation_tokens
        )
        figures[PROCESSOR] = tokens / worked
    if before is not None and after is not None:
        figures |= first_token_parts(Interval(before, after), result["time_to_first_token_ms"]["mean"])
    return figures


def figures_of(result: dict[str, Any], memory_bytes: int) -> Figures:
    """Return the figures in the JSON of `fastgen bench`, and the memory."""
    figures = {figure: float(reduce(getitem, path, result)) for figure, path in _PATHS.items()}  # type: ignore[arg-type]
    return {**figures, "memory MiB": round(memory_bytes / (1 << 20))}


def first_token_parts(during: Interval, client_mean_ms: float) -> Figures:
    """Divide the mean time to a first token, as clients saw it, into the server's parts and the rest."""

    def mean_ms(histogram: str) -> float:
        count = during.growth(f"{histogram}_count")
        return 1000 * during.growth(f"{histogram}_sum") / count if count else 0.0

    queue, first = mean_ms("request_queue_seconds"), mean_ms("time_to_first_token_seconds")
    return dict(zip(PARTS, (queue, first - queue, client_mean_ms - first, client_mean_ms), strict=True))


def _scrape(url: str) -> Scrape:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return Scrape.parse(answer.read().decode(), time.monotonic())


def _after_warm_up(url: str, running: subprocess.Popen[str]) -> Scrape:
    """Return the first scrape that counts the first token of the load's request to warm up."""
    while not (found := _scrape(url)).value("time_to_first_token_seconds_count") and running.poll() is None:
        time.sleep(0.02)
    return found


def main() -> None:
    """Run the contenders in turn and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    contenders = tomllib.loads(options.contenders.read_text())
    outcomes = in_turn(contenders, options.rounds, lambda _name, contender, seed: measure(contender, flags, seed))
    first, *others = contenders
    print(medians(outcomes, FIGURES), ratios(outcomes, [(name, first) for name in others], FIGURES), sep="\n\n")


if __name__ == "__main__":
    main()
