"""Times of calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]

_MIN_CALLS = 3
_MAX_CALLS = 200


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(run: Run, device: torch.device, seconds: float, *, most: int = _MAX_CALLS) -> float:
    """Return the median time of a call that is waited for, launches included.

    Args:
        run: called a few times before, and at most `most` times in all.
        device: where it runs.
        seconds: time for the repeats.
        most: most calls.
    """
    for _ in range(2):
        run()
    times: list[float] = []
    synchronize(device)
    end = time.perf_counter() + seconds
    while len(times) < most - 2 and (len(times) < _MIN_CALLS or time.perf_counter() < end):
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def device_seconds(run: Run, device: torch.device, seconds: float, *, most: int = _MAX_CALLS) -> float:
    """Return the time of a call on the device alone: replayed from a CUDA graph, without its launches.

    On a CPU it is `call_seconds`. Other arguments as there.
    """
    if device.type != "cuda":
        return call_seconds(run, device, seconds, most=most)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    once = _replay_seconds(graph, 1)
    count = max(_MIN_CALLS, min(most - 5, int(seconds / max(once, 1e-6))))
    return _replay_seconds(graph, count)


def _replay_seconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count
