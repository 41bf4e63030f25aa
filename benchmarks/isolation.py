"""How long one request delays the others: `python -m benchmarks.isolation [--model MODEL]`.

Four streams decode while one aggressor at a time arrives: a request that is large, invalid, or slow to handle, sent by
another process. For each the table has the largest gap between two tokens of the streams without it and with it. The
difference is what it costs the others. Then a short prompt is sent after two prompts of 6,000 tokens, while most of
their tokens are still to be computed, and the time to its first token is compared with theirs.

Without `--model`, the tests' scripted engine is used: the real server, scheduler and grammars over a model that costs
nothing, so that a gap is the fault of the server or the step loop. Elapsed times, so run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "tests")]

from engine.server.serving import REAL, SCRIPTED, Serving, serving  # noqa: E402

STREAMS = 4
LONG_PROMPT = 6000
COMPLETIONS = "/v1/completions"
# Sooner than the scripted engine can compute a fifth of two long prompts.
LATER_SECONDS = 0.1
# Ids from here on have no meaning to the scripted engine, as some of the first ones do.
UNUSED = 1000
SHORT = {"prompt": [100] * 5, "max_tokens": 4, "ignore_eos": True}


@dataclass(frozen=True)
class Aggressor:
    """A request that may delay others; sent `times` times, one after the other."""

    name: str
    path: str
    body: dict[str, Any]
    times: int = 1


def schema(properties: int) -> dict[str, Any]:
    """Return a JSON schema with so many properties."""
    named = {f"p{number}": {"type": "string", "maxLength": 9} for number in range(properties)}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


def aggressors() -> Iterator[Aggressor]:
    """Return the aggressors; each has a body of its own, because grammars are cached."""
    few = {**SHORT, "max_tokens": 8}
    yield Aggressor("logit_bias of 49,152 tokens, n=16", COMPLETIONS, few | {"n": 16, "logit_bias": biases(49152)})
    yield Aggressor("logit_bias of 1,024 tokens, n=16", COMPLETIONS, few | {"n": 16, "logit_bias": biases(1024)})
    yield Aggressor("the first grammar", COMPLETIONS, few | {"guided_regex": "(yes|no)"})
    yield Aggressor("a schema with 1,000 properties", COMPLETIONS, few | {"guided_json": schema(1000)})
    yield Aggressor("a schema with 3,000 properties", COMPLETIONS, few | {"guided_json": schema(3000)})
    yield Aggressor("a prompt of 8 million ids", COMPLETIONS, {"prompt": [1] * 8_000_000})
    yield Aggressor("a million prompts", COMPLETIONS, {"prompt": [[1]] * 1_000_000})
    yield Aggressor("/tokenize of 10 MB", "/tokenize", {"prompt": "word " * 2_000_000})
    yield Aggressor("/tokenize of 1 MB", "/tokenize", {"prompt": "word " * 200_000})
    yield Aggressor("a prompt of 6,000 tokens", COMPLETIONS, {"prompt": [5000] * LONG_PROMPT, "max_tokens": 1})
    yield Aggressor("200 invalid requests", COMPLETIONS, {"prompt": [10**6]}, times=200)


def biases(tokens: int) -> dict[str, float]:
    """Return a logit_bias of so many tokens."""
    return {str(token): -1.0 for token in range(tokens)}


def send(port: int, aggressor: Aggressor, content: bytes, begin: Any, statuses: Any) -> None:
    """Send the aggressor when told to. Runs in a process of its own."""
    begin.wait()
    for _ in range(aggressor.times):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", aggressor.path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
    statuses.put(response.status)


@contextmanager
def sender(port: int, aggressor: Aggressor) -> Iterator[tuple[Any, Any]]:
    """Prepare a process that sends the aggressor; yield the event that starts it and the queue of its status."""
    processes = multiprocessing.get_context("spawn")
    begin, statuses = processes.Event(), processes.Queue()
    content = json.dumps(aggressor.body).encode()
    process = processes.Process(target=send, args=(port, aggressor, content, begin, statuses))
    process.start()
    try:
        yield begin, statuses
    finally:
        process.terminate()
        process.join()


async def stream(port: int, body: dict[str, Any], times: list[float]) -> None:
    """Stream a completion and append the time of each chunk that arrives.

    Raises:
        RuntimeError: if it is not served, with the response.
    """
    content = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = f"Host: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}"
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    try:
        while data := await reader.read(1 << 16):
            if b'"text"' in data:
                times.append(time.monotonic())
            elif not times and not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError((data + await reader.read()).decode(errors="replace"))
    finally:
        writer.close()


async def largest_gap(port: int, seconds: float, aggressor: Aggressor | None = None) -> tuple[float, int]:
    """Return the largest gap of the streams in at least `seconds`, and the aggressor's status."""
    body = {"prompt": [100, 200, 300], "max_tokens": 100_000 // STREAMS, "ignore_eos": True}
    columns: list[list[float]] = [[] for _ in range(STREAMS)]
    tasks = [asyncio.create_task(stream(port, body, times)) for times in columns]
    while not all(columns):
        if failed := [task for task in tasks if task.done()]:
            await failed[0]  # raises
        await asyncio.sleep(0.01)
    status, began = 0, time.monotonic()
    if aggressor is not None:
        with sender(port, aggressor) as (begin, statuses):
            await asyncio.sleep(1.0)  # it has started by then
            began = time.monotonic()
            begin.set()
            status = await asyncio.to_thread(statuses.get, timeout=120)
    await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    end = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    marks = [[began, *(at for at in times if at >= began), end] for times in columns]
    return max(after - before for times in marks for before, after in itertools.pairwise(times)), status


async def first_token(port: int, num_tokens: int) -> float:
    """Return the seconds to the first token of a prompt of so many tokens, which shares no prefix with others."""
    began, times = time.monotonic(), list[float]()
    prompt = [UNUSED + num_tokens] + [7] * (num_tokens - 1)
    await stream(port, {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}, times)
    return times[0] - began


async def short_behind_long(port: int, long_prompt: int, seconds: float) -> tuple[float, list[float]]:
    """Return the seconds to the first token of a short prompt, and of two long ones sent `seconds` before it."""
    longs = [asyncio.create_task(first_token(port, long_prompt - number)) for number in range(2)]
    await asyncio.sleep(seconds)
    short = await first_token(port, 5)
    return short, list(await asyncio.gather(*longs))


def measure(server: Serving, seconds: float, repeats: int) -> None:
    """Print the tables."""
    print(f"{'aggressor':40}{'status':>8}{'without':>10}{'with':>10}{'added':>10}  (largest gap, s)")
    for aggressor in aggressors():
        without = min(asyncio.run(largest_gap(server.port, seconds))[0] for _ in range(repeats))
        found = [asyncio.run(largest_gap(server.port, seconds, aggressor)) for _ in range(repeats)]
        gap = min(gap for gap, _ in found)
        print(f"{aggressor.name:40}{found[0][1]:8}{without:10.3f}{gap:10.3f}{gap - without:10.3f}", flush=True)
    short, longs = asyncio.run(short_behind_long(server.port, LONG_PROMPT, LATER_SECONDS))
    print(f"first token of a short prompt: {short:.2f} s; of two of {LONG_PROMPT} tokens before it: ", end="")
    print(", ".join(f"{seconds:.2f} s" for seconds in longs), f"({short / max(longs):.2f} of the last)")


def main() -> None:
    """Start a server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model for the real engine, whose length is at least 8192")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="the smallest of so many counts (default: %(default)s)")
    parser.add_argument("--step-seconds", default="0.01", help="step of the scripted engine (default: %(default)s)")
    given = parser.parse_args()
    environment = {"SCRIPT_STEP_SECONDS": given.step_seconds, "SCRIPT_BLOCKS": "4096"}
    options = ("--max-model-length", "32768") if given.model is None else ("--max-model-length", "8192")
    command = SCRIPTED if given.model is None else REAL
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *options, command=command, environment=environment, model=given.model) as server,
    ):
        server.wait_status("/ready", 200)
        measure(server, given.seconds, given.repeats)


if __name__ == "__main__":
    main()
