"""CPU time of the HTTP process per streamed token, in microseconds.

Uses the tests' scripted engine, which has no model, so only the path from the engine's socket to the client's is
measured. CPU time, unlike elapsed time, does not depend on other load of the machine.

    python benchmarks/http_overhead.py [--streams 1 8 64] [--tokens 200] [--endpoint chat]
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


def processor_seconds(pid: int) -> tuple[float, float]:
    """Return the user and system CPU seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


async def stream(port: int, endpoint: str, tokens: int) -> None:
    """Read one stream to its end."""
    body = {**PROMPTS[endpoint], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = f"Host: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}"
    writer.write(f"POST {PATHS[endpoint]} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    received = await reader.read(-1)
    writer.close()
    assert b"data: [DONE]" in received, received[:500]


async def measure(server: Serving, endpoint: str, streams: int, tokens: int) -> tuple[float, float]:
    """Return the user and system CPU microseconds of the HTTP process per token, for concurrent streams."""
    began = processor_seconds(server.process.pid)
    await asyncio.gather(*(stream(server.port, endpoint, tokens) for _ in range(streams)))
    spent = zip(processor_seconds(server.process.pid), began, strict=True)
    program, kernel = ((after - before) / (streams * tokens) * 1e6 for after, before in spent)
    return program, kernel


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="tokens per stream (default: %(default)s)")
    parser.add_argument("--endpoint", choices=tuple(PATHS), default="completions")
    parser.add_argument("--step-seconds", default="0.01", help="duration of a step (default: %(default)s)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), environment={"SCRIPT_STEP_SECONDS": options.step_seconds}) as server,
    ):
        server.wait_status("/ready", 200)
        asyncio.run(measure(server, options.endpoint, 8, 50))  # warm
        print(f"{'streams':>8}{'µs/token':>10}{'user':>10}{'system':>10}")
        for streams in options.streams:
            repeats = max(1, 3000 // (streams * options.tokens))
            program, kernel = asyncio.run(measure(server, options.endpoint, streams, options.tokens * repeats))
            print(f"{streams:8}{program + kernel:10.1f}{program:10.1f}{kernel:10.1f}", flush=True)


if __name__ == "__main__":
    main()
