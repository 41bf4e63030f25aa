"""Time to sample the tokens of one step: `python benchmarks/sampling.py [--rows 256] [--vocabulary 49152]`.

Each row's logits fall with the logarithm of the token's rank, with a factor from 1.5 to 3 per row: top-p 0.95 keeps
from one to some hundreds of tokens. In the line "flat" they are nearly equal, which is the sampler's worst case. Every
sequence has 500 prompt tokens and 500 generated tokens, and gets those sampled here. Each figure is the minimum of its
repeats, with its ratio to a plain argmax in the same run, the cost of reading the logits once.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from timing import least_seconds

from fastgen.kernels.cpu import environment

environment.prepare()

import numpy as np  # noqa: E402
import torch  # noqa: E402  (OpenMP reads the environment when it is imported)

from fastgen.core.sampling_params import SamplingParams  # noqa: E402
from fastgen.core.sequence import RowParameters  # noqa: E402
from fastgen.sampling.host_sampler import HostSampler  # noqa: E402

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.95, temperature 0.8": {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    "typical-p 0.9 of the likeliest 200": {"typical_p": 0.9, "top_k": 200},
    "greedy, repetition penalty 1.1": {"temperature": 0, "repetition_penalty": 1.1},
    "top-p 0.95, presence and frequency penalty": {"top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, min_tokens": {"temperature": 0, "min_tokens": 10**9, "max_tokens": 10**9},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
    "flat: top-p 0.95": {"top_p": 0.95},
}


def make_logits(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return peaked and flat logits [rows, vocabulary]."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, vocabulary, generator=generator).argsort(-1) + 1
    slopes = torch.rand(rows, 1, generator=generator) * 1.5 + 1.5
    return -slopes * ranks.log(), torch.randn(rows, vocabulary, generator=generator) * 0.1


def make_sampler(rows: int, vocabulary: int, settings: dict[str, Any], end_tokens: frozenset[int]) -> HostSampler:
    """Return a sampler of `rows` sequences with 500 prompt tokens and 500 generated tokens."""
    made = HostSampler(vocabulary, end_tokens)
    for row in range(rows):
        tokens = random.Random(row).choices(range(vocabulary), k=1000)
        sampling = SamplingParams(**{"max_tokens": 600, **settings})
        made.admit(RowParameters(row, sampling, seed=row, num_prompt_tokens=500, tokens=tokens))
    return made


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="sequences that sample (default: 256)")
    parser.add_argument("--vocabulary", type=int, default=49152, help="columns of the logits (default: 49152)")
    parser.add_argument("--device", default="cpu", help="device of the logits (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(environment.usable_cpus())
    logits, flat = (
        rows.to(arguments.device, getattr(torch, arguments.dtype))
        for rows in make_logits(arguments.rows, arguments.vocabulary)
    )
    ends = frozenset({0, 2})

    with torch.inference_mode():
        floor = least_seconds(lambda: logits.argmax(-1).tolist(), arguments.seconds)
        print(
            f"{arguments.rows} rows of {arguments.vocabulary} on {arguments.device}, {torch.get_num_threads()} threads"
        )
        print(f"{'':44} {'ms a step':>10} {'to argmax':>10}")
        print(f"{'argmax alone':44} {floor * 1e3:10.1f} {1:10.2f}")
        for name, settings in SETTINGS.items():
            sampler = make_sampler(arguments.rows, arguments.vocabulary, settings, ends)

            own = flat if name.startswith("flat") else logits

            def run(sampler: HostSampler = sampler, own: torch.Tensor = own) -> object:
                return sampler.sample(own, np.arange(len(own)), np.full(len(own), 1000))

            seconds = least_seconds(run, arguments.seconds)
            print(f"{name:44} {seconds * 1e3:10.1f} {seconds / floor:10.2f}", flush=True)


if __name__ == "__main__":
    main()
