"""CPU time of the API processes per streamed token, in microseconds.

Uses the tests' scripted engine, which has no model, so only the path from the engine's socket to the client's is
measured. CPU time, unlike elapsed time, hardly depends on other load of the machine. But a server that gets too little
of the processor falls behind and sends several tokens in a chunk, which takes less: the last column tells.

    python benchmarks/http_overhead.py [--streams 1 8 64] [--tokens 200] [--endpoint chat] [--api-processes 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "tests")]

from engine.server.serving import Serving, serving  # noqa: E402

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS = {
    "completions": {"prompt": "one two three four five"},
    "chat": {"messages": [{"role": "user", "content": "one two three four five"}]},
}


def api_processes(server: Serving) -> list[int]:
    """Return the pids of the API processes: the server and its children but for the engine."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    engines = [pid for pid in children if b"scripted_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [server.process.pid, *(int(pid) for pid in children if pid not in engines)]


def processor_seconds(pids: list[int]) -> list[tuple[float, float]]:
    """Return the user and system CPU seconds of all threads of each process."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = os.sysconf("SC_CLK_TCK")
    return [(int(each[11]) / ticks, int(each[12]) / ticks) for each in fields]


async def stream(port: int, endpoint: str, tokens: int) -> int:
    """Read one stream to its end; return its number of chunks."""
    body = {**PROMPTS[endpoint], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = f"Host: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}"
    writer.write(f"POST {PATHS[endpoint]} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    received = await reader.read(-1)
    writer.close()
    assert b"data: [DONE]" in received, received[:500]
    return received.count(b"data: {")


async def measure(server: Serving, endpoint: str, streams: int, tokens: int) -> tuple[float, float, float, float]:
    """Send concurrent streams; return CPU microseconds of user and system, the busiest process's share, and chunks.

    The times and the number of chunks are per token of all streams, those of all API processes together.
    """
    pids = api_processes(server)
    began = processor_seconds(pids)
    chunks = sum(await asyncio.gather(*(stream(server.port, endpoint, tokens) for _ in range(streams))))
    spent = [
        (user - user_before, system - system_before)
        for (user, system), (user_before, system_before) in zip(processor_seconds(pids), began, strict=True)
    ]
    user, system = (sum(part) / (streams * tokens) * 1e6 for part in zip(*spent, strict=True))
    return user, system, max(map(sum, spent)) / max(1e-9, sum(map(sum, spent))), chunks / (streams * tokens)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream (default: %(default)s)")
    parser.add_argument("--endpoint", choices=tuple(PATHS), default="completions")
    parser.add_argument("--step-seconds", default="0.01", help="duration of a step (default: %(default)s)")
    parser.add_argument("--api-processes", default="1", help="as of `fastgen serve` (default: %(default)s)")
    options = parser.parse_args()
    flags, environment = ("--api-processes", options.api_processes), {"SCRIPT_STEP_SECONDS": options.step_seconds}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags, environment=environment) as server:
        server.wait_status("/ready", 200)
        asyncio.run(measure(server, options.endpoint, 8, 50))  # warm
        print(f"{'streams':>8}{'µs/token':>10}{'user':>10}{'system':>10}{'busiest':>10}{'chunks':>10}")
        for streams in options.streams:
            repeats = max(1, 3000 // (streams * options.tokens))
            tokens = options.tokens * repeats
            user, system, busiest, chunks = asyncio.run(measure(server, options.endpoint, streams, tokens))
            print(
                f"{streams:8}{user + system:10.1f}{user:10.1f}{system:10.1f}{busiest:10.0%}{chunks:10.2f}", flush=True
            )


if __name__ == "__main__":
    main()
