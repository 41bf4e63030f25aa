"""Speed and memory of a model with int8 matrices: `python benchmarks/int8.py MODEL`.

Each line is a step of N decodes, with float32, bfloat16 and int8 weights of the same model in one process, alternating.
int8 computes in the type that `--dtype auto` takes. Results are ratios of the minimum times, which other load on the
machine distorts least, and medians and quartiles of the ratios of consecutive times.

`--one-thread`: see `paired_timing`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from paired_timing import NUM_THREADS, clock, quartiles  # isort: skip  (before torch)

import torch
from forward_pass import BLOCK_SIZE, Scenario, make_plan

from fastgen.core.step_plan import StepPlan
from fastgen.kv_cache.memory import trim_heap
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import HostRows
from fastgen.model.layers.decoder import Decoder
from fastgen.model.native import load_on_cpu
from fastgen.model.processor import choose_cpu_dtype, describe_processor
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInputBuilder
from fastgen.settings import EngineConfig

ROWS = (1, 4, 8, 16, 32, 64, 256)


def run_of(model: Decoder, plan: StepPlan, cache: KVCache) -> Callable[[], torch.Tensor]:
    """Return a function that runs the step. The plan's sequences belong to it: they remember what they have sent."""
    builder, rows = StepInputBuilder(BLOCK_SIZE), HostRows(BLOCK_SIZE)

    def run() -> torch.Tensor:
        return model.head(model.forward(rows.apply(builder.build(plan)), cache))

    return run


def seconds_in_turns(runs: list[Callable[[], torch.Tensor]], budget: float) -> list[list[float]]:
    """Return the times of each, called in turn for `budget` seconds and at least three times."""
    times: list[list[float]] = [[] for _ in runs]
    end = clock() + budget
    while len(times[0]) < 3 or clock() < end:
        for own, run in zip(times, runs, strict=True):
            run()  # each call is timed with its own weights in the caches, not with the other's
            started = clock()
            run()
            own.append(clock() - started)
    return times


def faster(ours: list[float], theirs: list[float]) -> str:
    """Return how many times as fast ours are: by minimum times, and median and quartiles of consecutive times."""
    consecutive = quartiles(b / a for a, b in zip(ours, theirs, strict=True))
    return f"{min(theirs) / min(ours):.2f}; {consecutive}"


def resident_bytes() -> int:
    """Return the private memory of this process in bytes."""
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = (int(pages) * 4096 for pages in statm.read().split())
    return resident - shared


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each line (default: 6)")
    parser.add_argument("--one-thread", action="store_true", help="compare the processor time of one thread")
    parser.add_argument("--context", type=int, default=64, help="tokens of each decode (default: 64)")
    arguments = parser.parse_args()

    torch.set_num_threads(NUM_THREADS)
    torch.set_grad_enabled(False)
    source = ModelSource.open(arguments.model)
    config = EngineConfig(model=arguments.model, quantization="int8")
    dtype = choose_cpu_dtype(config).dtype
    models, sizes = [], []
    for form, quantization in (("float32", "none"), ("bfloat16", "none"), (dtype, "int8")):
        before = resident_bytes()
        models.append(
            load_on_cpu(
                source,
                dtype=getattr(torch, form),
                quantization=quantization,
                max_model_length=None,
                progress=lambda _fraction: None,
            )
        )
        trim_heap()  # return what loading freed, or the next model would reuse it
        sizes.append(resident_bytes() - before)
    print(f"{describe_processor(dtype, 'int8')}; activations {dtype}, {torch.get_num_threads()} threads")
    print(f"{arguments.model}: weights take {sizes[2] / sizes[0]:.2f} of float32's memory ({sizes[0] >> 20} MiB)")
    print("| rows | tokens/s in float32, bfloat16, int8 | int8 : float32 | int8 : bfloat16 |\n|---|---|---|---|")
    for rows in ROWS:
        runs = []
        for model in models:
            plan, num_blocks = make_plan(Scenario("", (arguments.context,) * rows), source.architecture.vocab_size)
            cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, dtype=model.dtype)
            cache.keys.normal_()
            cache.values.normal_()
            runs.append(run_of(model, plan, cache))
        times = seconds_in_turns(runs, arguments.seconds)
        speeds = ", ".join(f"{rows / min(own):.0f}" for own in times)
        print(f"| {rows} | {speeds} | {faster(times[2], times[0])} | {faster(times[2], times[1])} |", flush=True)


if __name__ == "__main__":
    main()
