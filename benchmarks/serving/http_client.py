"""The workload against any OpenAI-compatible server: `python http_client.py URL --name NAME`."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import workload


async def send(http: httpx.AsyncClient, model: str, job: workload.Job) -> workload.Trace:
    """One streamed request."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.generate,
        "min_tokens": job.generate,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    trace = workload.Trace(len(job.prompt), time.perf_counter())
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            assert "error" not in event, line
            if event["choices"]:
                trace.tokens.append(now)
            if event.get("usage"):
                trace.generated = event["usage"]["completion_tokens"]
    return trace


async def client(http: httpx.AsyncClient, model: str, jobs: Iterator[workload.Job]) -> list[workload.Trace]:
    """One client of the loop."""
    return [await send(http, model, job) for job in jobs]


async def run(url: str, model: str, load: workload.Workload) -> list[workload.Trace]:
    """The loop, to its end."""
    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await send(http, model, load.warm_up())
        jobs = [load.client(number) for number in range(load.clients)]
        return [trace for traces in await asyncio.gather(*(client(http, model, j) for j in jobs)) for trace in traces]


def main() -> None:
    """Runs the workload and prints its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="smollm2", help="the model's name at the server")
    parser.add_argument("--name", default="server")
    workload.add_arguments(parser)
    options = parser.parse_args()
    load = workload.of_arguments(options)
    workload.report(options.name, asyncio.run(run(options.url, options.model, load)))


if __name__ == "__main__":
    main()
