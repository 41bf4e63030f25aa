"""Run OpenVINO GenAI's continuous batching in process under the load of `fastgen bench`, and print the same JSON.

Requires the package openvino-genai, and the engine's folder on PYTHONPATH for the load, which needs only the standard
library: `python openvino_genai_loop.py EXPORTED_MODEL --requests 48 --seed 0 --json`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any

import openvino_genai as genai

from fastgen.bench.results import Answer, Results, as_json
from fastgen.bench.workload import Ask, Workload


@dataclass
class Sent:
    """A request in flight."""

    handle: Any
    prompt_tokens: int
    at: float
    arrivals: list[float] = field(default_factory=list)


def run(pipeline: Any, workload: Workload) -> Results:
    """Run a closed-loop workload to its end."""
    tokenizer = pipeline.get_tokenizer()
    asks = iter([(ask, tokenizer.encode(ask.text).input_ids) for ask in workload.asks()])
    in_flight: list[Sent] = []
    answers: list[Answer] = []

    def send(ask: Ask, tokens: Any) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = ask.max_tokens, True, False
        at = time.perf_counter()
        handle = pipeline.add_request(len(answers) + len(in_flight), tokens, config)
        in_flight.append(Sent(handle, tokens.shape[1], at))

    begin = time.perf_counter()
    for _ in range(workload.clients):
        if (following := next(asks, None)) is not None:
            send(*following)
    while in_flight:
        pipeline.step()
        now = time.perf_counter()
        for sent in in_flight.copy():
            while sent.handle.can_read():
                for output in sent.handle.read().values():
                    sent.arrivals += [now] * len(output.generated_ids)
            if sent.handle.get_status() != genai.GenerationStatus.RUNNING:
                in_flight.remove(sent)
                answers.append(Answer(sent.at, tuple(sent.arrivals), sent.prompt_tokens, len(sent.arrivals)))
                if (following := next(asks, None)) is not None:
                    send(*following)
    return Results(time.perf_counter() - begin, tuple(answers), ())


def main() -> None:
    """Run the load and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of the exported model")
    parser.add_argument("--token-budget", type=int, default=256)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--generation-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32", help="of the computation and the cache")
    parser.add_argument(
        "--json", action="store_true", help="accepted for compatibility with fastgen bench; the output is always JSON"
    )
    options = parser.parse_args()
    workload = Workload(
        options.requests, options.clients, options.prompt_tokens, options.generation_tokens, 0.3, options.seed
    )
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = options.token_budget, 64
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, True
    scheduler.cache_size = 2  # GB
    precision = {"INFERENCE_PRECISION_HINT": options.precision, "KV_CACHE_PRECISION": options.precision}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", precision)
    run(pipeline, workload.warm_up())
    print(json.dumps(as_json(workload, run(pipeline, workload))))


if __name__ == "__main__":
    main()
