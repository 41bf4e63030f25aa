"""OpenVINO GenAI's continuous batching in this process: `python openvino.py EXPORTED_MODEL` in an environment that has
package openvino-genai. README.md says how to make both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
import workload


class Client:
    """One client of the loop and its request under way."""

    def __init__(self, jobs: Any) -> None:
        self.jobs = jobs
        self.handle: Any = None
        self.trace: workload.Trace | None = None


def run(pipeline: Any, clients: list[Client]) -> list[workload.Trace]:
    """The loop, to its end."""
    traces: list[workload.Trace] = []
    started = 0

    def send(client: Client) -> None:
        nonlocal started
        job = next(client.jobs, None)
        client.handle = None
        if job is None:
            return
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = job.generate, True, False
        client.trace = workload.Trace(len(job.prompt), time.perf_counter())
        tokens = openvino.Tensor(np.array([job.prompt], np.int64))
        client.handle = pipeline.add_request(started, tokens, config)
        started += 1

    for client in clients:
        send(client)
    while any(client.handle for client in clients):
        pipeline.step()
        now = time.perf_counter()
        for client in clients:
            if client.handle is None:
                continue
            while client.handle.can_read():
                for output in client.handle.read().values():
                    client.trace.tokens += [now] * len(output.generated_ids)
            if client.handle.get_status() != genai.GenerationStatus.RUNNING:
                traces.append(client.trace)
                send(client)
    return traces


def main() -> None:
    """Runs the workload and prints its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the exported model")
    parser.add_argument("--token-budget", type=int, default=256)
    workload.add_arguments(parser)
    options = parser.parse_args()
    load = workload.of_arguments(options)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = options.token_budget, 64
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, True
    scheduler.cache_size = 2  # GB
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", exact)
    run(pipeline, [Client(iter([load.warm_up()]))])
    traces = run(pipeline, [Client(load.client(number)) for number in range(load.clients)])
    workload.report(f"OpenVINO GenAI, budget {options.token_budget}", traces)


if __name__ == "__main__":
    main()
