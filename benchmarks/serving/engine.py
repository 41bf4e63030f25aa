"""The engine in this process, driven as the worker drives it: `python engine.py MODEL [--KNOB VALUE ...]`."""

from __future__ import annotations

import argparse
import time

import workload

from fastgen.cli import add_knobs, given
from fastgen.config import KNOBS, EngineConfig
from fastgen.core.request import Request, SamplingParams
from fastgen.engine import Engine
from fastgen.worker import load_engine


def run(engine: Engine, load: workload.Workload) -> list[workload.Trace]:
    """The loop, to its end."""
    clients = [load.client(number) for number in range(load.clients)]
    under_way: dict[str, tuple[int, workload.Trace]] = {}
    traces: list[workload.Trace] = []

    def send(client: int) -> None:
        job = next(clients[client], None)
        if job is None:
            return
        request_id = str(len(traces) + len(under_way))
        sampling = SamplingParams(temperature=0, max_tokens=job.generate, ignore_eos=True)
        under_way[request_id] = client, workload.Trace(len(job.prompt), time.perf_counter())
        engine.add(Request(id=request_id, prompt_token_ids=job.prompt, sampling=sampling))

    for client in range(load.clients):
        send(client)
    while under_way:
        outputs = engine.step().outputs
        now = time.perf_counter()
        for output in outputs:
            client, trace = under_way[output.request_id]
            trace.tokens += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                traces.append(trace)
                del under_way[output.request_id]
                send(client)
    return traces


def main() -> None:
    """Runs the workload and prints its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--name", default="FastGen engine")
    workload.add_arguments(parser)
    add_knobs(parser, KNOBS)
    options = parser.parse_args()
    load = workload.of_arguments(options)
    engine = load_engine(EngineConfig(model=options.model, **given(options, KNOBS)))
    run(engine, workload.Workload(clients=1, requests=1, generate=8))
    workload.report(options.name, run(engine, load))


if __name__ == "__main__":
    main()
