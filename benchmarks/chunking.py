"""Effect of chunking and the inter-token target on throughput and latency: `python benchmarks/chunking.py`.

Runs the real engine and scheduler under closed-loop clients, over a simulated device that takes the step times of a
table: SmolLM2-135M in float32 on two cores, measured for issue 4 (tokens per step: tokens/s). So the figures are the
same on every machine and depend only on the scheduler's decisions.

`--base` and `--token`, in milliseconds, replace the table by a straight line, for example that of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_output import StepOutput
from fastgen.engine.core import Engine
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import CompletedTicket
from fastgen.settings import EngineConfig

# Tokens per step, tokens per second in such steps.
RATES = ((8, 156), (16, 292), (32, 450), (64, 594), (128, 720), (256, 849), (512, 881))
SETTINGS = tuple(itertools.product(("greedy", "even"), ("off", "auto")))

StepSeconds = Callable[[int], float]


def measured(tokens: int) -> float:
    """Return the seconds of a step, interpolated linearly in the table."""
    points = [(size, size / rate) for size, rate in RATES]
    (left, at_left), (right, at_right) = next(
        (pair for pair in itertools.pairwise(points) if tokens <= pair[1][0]), (points[-2], points[-1])
    )
    return at_left + (at_right - at_left) * (tokens - left) / (right - left)


@dataclass
class Device:
    """A runner whose steps take the given time and always sample the same token."""

    step_seconds: StepSeconds
    now: float = 0.0
    vocab_size: int = 1000
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks: int = 4096
    block_size: int = 64
    num_host_blocks: int = 0
    num_state_slots: int = 0
    window_group: None = None
    seconds_per_block: float = 0.0
    steps_in_flight: int = 1
    max_model_length: int = 32768

    def clock(self) -> float:
        """Simulated seconds."""
        return self.now

    def launch(self, step: StepInput) -> CompletedTicket:
        """Advance the clock."""
        self.now += self.step_seconds(step.num_tokens)
        return CompletedTicket(StepOutput([1] * len(step.sampled)))


@dataclass(frozen=True)
class Load:
    """Closed-loop clients: each sends its next request when its previous one has finished."""

    name: str
    clients: int
    requests: int
    prompt: int = 512
    generate: int = 64
    deviation: float = 0.3
    every: int = 0  # one request in this many has `long` prompt tokens
    long: int = 0

    def requests_to_send(self) -> Iterator[Request]:
        """Return all requests; they are the same in every run."""
        rng = random.Random(7)

        def about(mean: int) -> int:
            return max(1, round(rng.gauss(mean, self.deviation * mean)))

        for number in range(self.requests):
            prompt = self.long if self.every and number % self.every == self.every - 1 else about(self.prompt)
            yield Request(
                id=str(number),
                prompt_token_ids=[rng.randrange(1000) for _ in range(prompt)],
                sampling=SamplingParams(max_tokens=about(self.generate), temperature=0),
            )


LOADS = (
    Load("2 clients, 512/64", 2, 80),
    Load("8 clients, 512/64 (the acceptance load)", 8, 240),
    Load("16 clients, 512/64", 16, 320),
    Load("64 clients, 512/64", 64, 640),
    Load("8 clients, 128/256 (chat)", 8, 160, prompt=128, generate=256),
    Load("8 clients, 2000/100", 8, 120, prompt=2000, generate=100),
    Load("8 clients, 200/100, every 20th prompt 6000", 8, 200, prompt=200, generate=100, every=20, long=6000),
    Load("16 clients, 200/100, every 10th prompt 6000", 16, 320, prompt=200, generate=100, every=10, long=6000),
)


@dataclass
class Figures:
    """Client-side results: prompt and generated tokens, times to first token and inter-token gaps in seconds.

    Attributes:
        first_long: the times to first token of the long prompts; they are in `first`, too.
    """

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    first_long: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def run(load: Load, step_seconds: StepSeconds, budget: int, chunking: str, target: int | str) -> Figures:
    """Run a load to its end."""
    device = Device(step_seconds)
    config = EngineConfig(
        model="simulated", token_budget=budget, max_sequences=min(256, budget), chunking=chunking,
        inter_token_target=target,
    )  # fmt: skip
    engine = Engine(device, config, device.clock)
    figures, todo = Figures(), load.requests_to_send()
    sent: dict[str, float] = {}
    long: set[str] = set()
    last: dict[str, float] = {}

    def send() -> None:
        if (request := next(todo, None)) is not None:
            engine.add(request)
            sent[request.id] = device.now
            if load.every and len(request.prompt_token_ids) == load.long:
                long.add(request.id)
            figures.tokens += len(request.prompt_token_ids)

    for _ in range(load.clients):
        send()
    while engine.has_work:
        for output in engine.step().outputs:
            request_id = output.request_id
            figures.tokens += len(output.token_ids)
            if request_id in last:
                figures.gaps.append(device.now - last[request_id])
            else:
                figures.first.append(device.now - sent[request_id])
                if request_id in long:
                    figures.first_long.append(figures.first[-1])
            last[request_id] = device.now
            if output.finish_reason is not None:
                send()
    figures.seconds = device.now
    return figures


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=256, help="token budget per step")
    parser.add_argument("--base", type=float, help="milliseconds of a step without tokens")
    parser.add_argument("--token", type=float, help="milliseconds per token")
    parser.add_argument("--load", type=int, action="append", choices=range(len(LOADS)), help="only these loads")
    parser.add_argument("--target", type=int, action="append", default=[], help="further inter-token targets, in ms")
    given = parser.parse_args()
    step_seconds: StepSeconds = measured
    if given.base is not None and given.token is not None:
        base, token = given.base / 1000, given.token / 1000

        def step_seconds(tokens: int) -> float:
            return base + token * tokens

    fixed = tuple(itertools.product(("greedy", "even"), given.target))
    for load in [LOADS[index] for index in given.load or range(len(LOADS))]:
        print(f"\n{load.name}, budget {given.budget}")
        print("chunking target   tok/s   (x)  TTFT p50    p95 |  ITL p50    p99    max  (p99 x)   seconds")
        reference = None
        for chunking, target in (*SETTINGS, *fixed):
            got = run(load, step_seconds, given.budget, chunking, target)
            rate, tail = got.tokens / got.seconds, percentile(got.gaps, 0.99)
            reference = reference or (rate, tail)
            print(
                f"{chunking:8} {target!s:6} {rate:7.1f}  {rate / reference[0]:4.2f}  {percentile(got.first, 0.5):8.3f} "
                f"{percentile(got.first, 0.95):6.3f} | {percentile(got.gaps, 0.5):8.3f} {tail:6.3f} "
                f"{max(got.gaps):6.3f}  ({tail / reference[1]:4.2f})  {got.seconds:8.1f}"
            )
            if got.first_long:
                short = sorted(set(got.first) - set(got.first_long))
                print(
                    f"{'':16}first token of short prompts p50 {percentile(short, 0.5):.3f}, p95 "
                    f"{percentile(short, 0.95):.3f}; of long ones p50 {percentile(got.first_long, 0.5):.3f}, p95 "
                    f"{percentile(got.first_long, 0.95):.3f}"
                )


if __name__ == "__main__":
    main()
