"""Simulated engines: one server that answers scrapes of `/metrics` at any address, with the metrics of real engines.

Nothing is computed: the counters grow as those of engines under a constant load. The response has the same metrics, and
so the same size, as that of a real engine. It serves until it is killed.

    python benchmarks/simulated_engines.py [--port 8000] [--model simulated] [--utilization 0.6]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import parse_qs

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "operator", "tests")]

from prometheus_client import generate_latest  # noqa: E402

from fastgen.server.serving.metrics import Metrics  # noqa: E402
from fastgen_operator.objects.container import HTTP_PORT  # noqa: E402
from harness.fluid import BUDGET, GENERATED, PROMPT, PROMPT_RATE, STEP  # noqa: E402

MODEL = "simulated"
# Of the rate with full steps, so that the autoscaler holds the replicas. At 0.65 it adds some.
UTILIZATION = 0.6


class Exposition:
    """The metrics of an engine at a constant utilization of its capacity, in the Prometheus text format."""

    def __init__(self, model: str, utilization: float) -> None:
        self._began = time.monotonic()
        self._rate = utilization * PROMPT_RATE
        # The lines of a real engine without requests, of which some get other values.
        self._lines = dict(
            line.rsplit(" ", 1) if not line.startswith("#") else (line, "")
            for line in generate_latest(Metrics(model).registry).decode().splitlines()
        )
        self._rendered_at = float("-inf")
        self._texts: dict[bytes, bytes] = {}  # by the query of the request
        self._owner = f'model_name="{model}"'
        self._set("kv_cache_usage_ratio", 0.1)
        self._set("kv_cache_capacity_tokens", 1e6)
        self._set("kv_cache_tokens", 1000.0)
        self._set("token_budget", BUDGET)
        self._set("num_requests_running", 1.0)
        for name, value in zip(STEP._fields, STEP, strict=True):
            self._set("step_model", value, f'coefficient="{name}"')

    def text(self, query: bytes) -> bytes:
        """Return the metrics as of the last quarter of a second: a thousand engines share this program's processor.

        Args:
            query: of the request's path. Its `name[]` parameters choose the samples.
        """
        now = time.monotonic()
        if now - self._rendered_at >= 0.25:
            self._texts.clear()
            self._rendered_at = now
        if query not in self._texts:
            self._texts[query] = self.text_at(now - self._began, parse_qs(query.decode()).get("name[]", []))
        return self._texts[query]

    def text_at(self, seconds: float, names: Collection[str]) -> bytes:
        """Return the samples of these names, all if there are none, so many seconds after the start."""
        prompts = seconds * self._rate
        requests = prompts / PROMPT
        self._set("arrived_prompt_tokens_total", prompts)
        self._set("scheduled_tokens_total", prompts, 'phase="prefill"')
        self._set("scheduled_tokens_total", requests * GENERATED, 'phase="decode"')
        self._set("request_prompt_tokens_count", requests)
        self._set("request_prompt_tokens_sum", prompts)
        self._set("request_generation_tokens_sum", requests * GENERATED)
        # A real engine also sends the comments of each metric of which a sample is asked for.
        chosen, comments = [], []
        for name, value in self._lines.items():
            if name.startswith("#"):
                comments = [*comments, name] if name.startswith("# TYPE") else [name]
            elif not names or name.partition("{")[0] in names:
                chosen += [*comments, f"{name} {value}"]
                comments = []
        return "\n".join(chosen).encode() + b"\n"

    def _set(self, name: str, value: float, label: str = "") -> None:
        labels = sorted(filter(None, (self._owner, label)))
        line = f"fastgen_{name}{{{','.join(labels)}}}"
        assert line in self._lines, f"an engine has no metric {line}"
        self._lines[line] = repr(value)


class Server(asyncio.Protocol):
    """Answers every request of a connection with the metrics."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        *requests, self._received = (self._received + data).split(b"\r\n\r\n")
        for request in requests:
            body = self._exposition.text(request.split(b" ")[1].partition(b"?")[2])
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)
            if b"\r\nconnection: close" in request.lower():
                self._transport.close()


async def serve(port: int, exposition: Exposition) -> None:
    """Serve until cancelled."""
    server = await asyncio.get_running_loop().create_server(lambda: Server(exposition), "0.0.0.0", port, backlog=1000)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=HTTP_PORT)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--utilization", type=float, default=UTILIZATION, help="of the rate with full steps")
    options = parser.parse_args()
    asyncio.run(serve(options.port, Exposition(options.model, options.utilization)))


if __name__ == "__main__":
    main()
