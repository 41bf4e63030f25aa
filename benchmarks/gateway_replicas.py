"""First tokens of three real engines behind the gateway, behind random choice, and behind least requests.

Each engine has a limit of processor time, as a pod has, and a KV cache that holds a part of the system prompts. Envoy
and the picker are the real programs; the API server is the tests' stand-in. Random choice and least requests are made
by the client, which knows all requests in flight. Nothing else should run on the machine. Needs root and cgroups.

    python benchmarks/gateway_replicas.py [--rate 1.5] [--seconds 45]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "operator", "gateway", "tests")]

from cluster.pod_faults import limit_group  # noqa: E402
from engine.server.serving import REAL, Serving, serving  # noqa: E402
from fastgen.api_client.http import RemoteServer  # noqa: E402
from fastgen.bench.workload import Workload  # noqa: E402
from fastgen.model.processor import describe_processor  # noqa: E402
from gateway.gateway_pod import GatewayPod, wait_for_ready  # noqa: E402
from gateway.stand_ins import ApiServerStandIn, LoopThread  # noqa: E402

REPLICAS = 3
SYSTEM_PROMPTS = 12
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, DEVIATION = 320, 12, 8, 0.2
# Of the demo model's keys and values it holds about half of the system prompts.
CACHE = "96MiB"
CORES, SLOW_CORES = 0.6, 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: its time in seconds and its messages."""

    time: float
    system: str
    question: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client saw: seconds to the first token, prompt tokens, and those from a prefix cache."""

    first_token: float
    prompt: int
    cached: int


def arrivals(name: str, rate: float, seconds: float) -> list[Arrival]:
    """Return requests at random times, which are the same for each name; the k-th system prompt is 1 / k as popular.

    Args:
        name: what system prompts begin with, so that none is cached yet.
        rate: requests in a second.
        seconds: of all of them.
    """
    rng = random.Random(0)
    systems = [f"{name} {text}" for text in texts(rng, SYSTEM_PROMPTS, SYSTEM_TOKENS)]
    weights = [1 / (number + 1) for number in range(SYSTEM_PROMPTS)]
    times = list(takewhile(lambda time: time < seconds, accumulate(iter(lambda: rng.expovariate(rate), None))))
    questions = texts(rng, len(times), QUESTION_TOKENS)
    return [Arrival(*each) for each in zip(times, rng.choices(systems, weights, k=len(times)), questions, strict=True)]


def texts(rng: random.Random, number: int, tokens: int) -> list[str]:
    """Return texts of so many tokens on average."""
    return [ask.text for ask in Workload(number, 1, tokens, ANSWER_TOKENS, DEVIATION, rng.getrandbits(32)).asks()]


def ask(server: RemoteServer, arrival: Arrival) -> Answer:
    """Send a request and read its stream."""
    messages = [{"role": "system", "content": arrival.system}, {"role": "user", "content": arrival.question}]
    body = {
        "model": "m", "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    for event in server.stream("/v1/chat/completions", body):
        if not first and event["choices"] and event["choices"][0]["delta"].get("content"):
            first = time.perf_counter() - sent
        usage = event.get("usage") or usage
    return Answer(first, usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


class Choice:
    """The client's choice among replicas; `chosen` is called with the numbers of requests in flight."""

    def __init__(self, urls: Sequence[str], chosen: Callable[[Sequence[int]], int]) -> None:
        self._servers = [RemoteServer(url) for url in urls]
        self._in_flight, self._lock, self._chosen = [0] * len(urls), threading.Lock(), chosen

    def __call__(self, arrival: Arrival) -> Answer:
        with self._lock:
            place = self._chosen(self._in_flight)
            self._in_flight[place] += 1
        try:
            return ask(self._servers[place], arrival)
        finally:
            with self._lock:
                self._in_flight[place] -= 1


def random_choice(in_flight: Sequence[int]) -> int:
    """Return any replica, as a Service does for a new connection."""
    return random.randrange(len(in_flight))


def least_requests(in_flight: Sequence[int]) -> int:
    """Return a replica with the fewest requests in flight, a random one of several."""
    fewest = min(in_flight)
    return random.choice([place for place, number in enumerate(in_flight) if number == fewest])


def run(send: Callable[[Arrival], Answer], requests: Sequence[Arrival], warm_up: float) -> list[Answer]:
    """Send each request at its time, and return the answers to those after the warm-up.

    Raises:
        RemoteError: a request failed.
    """
    began = time.perf_counter()
    with ThreadPoolExecutor(256) as pool:
        futures = []
        for request in requests:
            time.sleep(max(0.0, began + request.time - time.perf_counter()))
            futures.append((request.time, pool.submit(send, request)))
        return [future.result() for at, future in futures if at >= warm_up]


@contextmanager
def cgroup(name: str) -> Iterator[Path]:
    """Make a cgroup that can limit the processor time of processes; yield its folder."""
    first = Path("/sys/fs/cgroup/cpu")
    root = first if first.is_dir() else Path("/sys/fs/cgroup")
    folder = root / f"fastgen-{os.getpid()}-{name}"
    folder.mkdir()

    try:
        yield folder
    finally:
        for _ in range(100):  # until the kernel has removed the killed processes
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def row(name: str, answers: Sequence[Answer]) -> str:
    """Return a line of the table."""
    cuts = quantiles([answer.first_token for answer in answers], n=100)
    hits = sum(answer.cached for answer in answers) / sum(answer.prompt for answer in answers)
    return f"| {name} | {len(answers)} | {cuts[49]:.2f} | {cuts[94]:.2f} | {cuts[98]:.2f} | {100 * hits:.1f} |"


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1.5, help="requests in a second, to all replicas together")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each run, after a warm-up of half as long")
    options = parser.parse_args()
    print(describe_processor(), f"{options.rate:g} requests/s, {options.seconds:g} s")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines, groups = start(stack, folder)
        api = ApiServerStandIn(LoopThread())
        stack.callback(api.stop)
        (folder / "gateway").mkdir()
        pod = GatewayPod(folder / "gateway", api.url)
        pod.start()
        stack.callback(pod.stop)
        api.deployment("m")
        api.endpoints("m", *(f"127.0.0.1:{engine.port}" for engine in engines))
        wait_for_ready(pod, "m", REPLICAS)
        urls = [engine.url for engine in engines]
        rate = options.rate
        routings: Mapping[str, tuple[Callable[[Arrival], Answer], float]] = {
            "one replica, a third of the rate": (Choice(urls[:1], random_choice), rate / REPLICAS),
            "random": (Choice(urls, random_choice), rate),
            "least requests": (Choice(urls, least_requests), rate),
            "gateway": (Choice([pod.url], random_choice), rate),
        }
        for what, cores in (("three replicas", CORES), ("one of three with a third of the processor time", SLOW_CORES)):
            limit_group(groups[-1], cores)
            print(f"\n{what}\n| routing | requests | first token p50, s | p95 | p99 | from the prefix cache, % |")
            print("|---|---|---|---|---|---|")
            for name, (send, of_all) in routings.items():
                print(row(name, measure(send, f"{what}, {name}", of_all, options)), flush=True)


def measure(send: Callable[[Arrival], Answer], name: str, rate: float, options: argparse.Namespace) -> list[Answer]:
    """Return the answers of a run."""
    warm_up = options.seconds / 2
    return run(send, arrivals(name, rate, warm_up + options.seconds), warm_up)


def start(stack: ExitStack, folder: Path) -> tuple[list[Serving], list[Path]]:
    """Start the engines, each in a cgroup with a limit; return them and the folders of the cgroups."""
    engines, groups = [], []
    for number in range(REPLICAS):
        own = folder / str(number)
        own.mkdir()
        groups.append(stack.enter_context(cgroup(str(number))))
        command = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(groups[-1] / "cgroup.procs"), *REAL)
        flags = ("--served-model-name", "m", "--kv-cache-memory", CACHE)
        engines.append(stack.enter_context(serving(own, *flags, command=command)))
    for engine, group in zip(engines, groups, strict=True):
        engine.wait_status("/ready", 200)
        assert limit_group(group, CORES)
    return engines, groups


if __name__ == "__main__":
    main()
