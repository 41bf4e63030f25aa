"""The engine in this process, driven as the worker drives it: `python engine.py MODEL [--set token_budget=128 ...]`."""

from __future__ import annotations

import argparse
import time
from typing import Any

import workload

from fastgen.calibration import prepare
from fastgen.config import EngineConfig
from fastgen.core.request import Request, SamplingParams
from fastgen.core.step_model import StepModel
from fastgen.engine import Engine
from fastgen.model.loader import load_runner
from fastgen.model.source import ModelSource


def load(config: EngineConfig) -> Engine:
    """An engine as the worker makes it."""

    def quiet(_stage: str, _fraction: float) -> None:
        pass

    runner = load_runner(ModelSource.open(config.model), config, quiet)
    config, measured = prepare(runner, config, quiet)
    return Engine(runner, config, step_model=StepModel.of(measured))


def knob(text: str) -> tuple[str, int | str | bool]:
    """NAME=VALUE as a setting of `EngineConfig`."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)


def run(engine: Engine, work: workload.Workload) -> list[workload.Trace]:
    """The loop, to its end."""
    clients = [work.client(number) for number in range(work.clients)]
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

    for client in range(work.clients):
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
    parser.add_argument("--set", type=knob, nargs="*", default=[], metavar="KNOB=VALUE", help="settings of the engine")
    options = parser.parse_args()
    settings: dict[str, Any] = dict(options.set)
    engine = load(EngineConfig(model=options.model, **settings))
    run(engine, workload.Workload(clients=1, requests=1, generate=8, seed=-1))
    workload.report(options.name, run(engine, workload.of_arguments(options)))


if __name__ == "__main__":
    main()
