"""Speed and memory of a model with int8 matrices: `python benchmarks/int8.py MODEL`.

Each line is a step of N decodes with a context of 64 tokens, with float32 and int8 weights of the same model in one
process, alternating. The result is the ratio of the minimum times, which other load on the machine distorts least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from forward_pass import BLOCK_SIZE, Scenario, make_plan

from fastgen.kernels.cpu import environment

environment.prepare()

import torch  # noqa: E402  (OpenMP reads the environment when it is imported)

from fastgen.core.scheduler import StepPlan  # noqa: E402
from fastgen.kv_cache.memory import trim_heap  # noqa: E402
from fastgen.kv_cache.tensors import KVCache  # noqa: E402
from fastgen.model.forward_input import HostRows  # noqa: E402
from fastgen.model.layers.decoder import Decoder  # noqa: E402
from fastgen.model.native import load_on_cpu  # noqa: E402
from fastgen.model.source import ModelSource  # noqa: E402
from fastgen.model.step_input import StepInputBuilder  # noqa: E402

ROWS = (1, 4, 8, 32, 256)
CONTEXT = 64


def run_of(model: Decoder, plan: StepPlan, cache: KVCache) -> Callable[[], torch.Tensor]:
    """Return a function that runs the step."""

    def run() -> torch.Tensor:
        return model.head(model.forward(HostRows(BLOCK_SIZE).apply(StepInputBuilder(BLOCK_SIZE).build(plan)), cache))

    return run


def least_seconds_in_turns(runs: list[Callable[[], torch.Tensor]], budget: float) -> list[float]:
    """Return the minimum time of each, called in turn for `budget` seconds and at least three times."""
    least = [float("inf")] * len(runs)
    end, rounds = time.perf_counter() + budget, 0
    while rounds < 3 or time.perf_counter() < end:
        for number, run in enumerate(runs):
            run()  # each call is timed with its own weights in the caches, not with the other's
            started = time.perf_counter()
            run()
            least[number] = min(least[number], time.perf_counter() - started)
        rounds += 1
    return least


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
    arguments = parser.parse_args()

    torch.set_num_threads(environment.usable_cpus())
    torch.set_grad_enabled(False)
    source = ModelSource.open(arguments.model)
    models, sizes = [], []
    for quantization in ("none", "int8"):
        before = resident_bytes()
        models.append(
            load_on_cpu(source, quantization=quantization, max_model_length=None, progress=lambda _fraction: None)
        )
        trim_heap()  # return what loading freed, or the next model would reuse it
        sizes.append(resident_bytes() - before)
    print(f"{arguments.model}: weights take {sizes[1] / sizes[0]:.2f} of float32's memory ({sizes[0] >> 20} MiB)")
    print(f"{'rows':>5} {'float32 tokens/s':>17} {'int8 tokens/s':>14} {'ratio':>6}")
    for rows in ROWS:
        plan, num_blocks = make_plan(Scenario("", (CONTEXT,) * rows), source.architecture.vocab_size)
        cache = KVCache(models[0].kv_shape, num_blocks, BLOCK_SIZE)
        cache.keys.normal_()
        cache.values.normal_()
        plain, small = least_seconds_in_turns([run_of(model, plan, cache) for model in models], arguments.seconds)
        print(f"{rows:5} {rows / plain:17.0f} {rows / small:14.0f} {plain / small:6.2f}", flush=True)


if __name__ == "__main__":
    main()
