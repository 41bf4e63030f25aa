"""The operator's process: the limit on open files, garbage collection, signals, and the end of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from fastgen_operator.kinds import POD, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.runtime.process import collect_garbage_less_often, end_generators_silently

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from fastgen_operator.runtime.process import raise_open_files_limit
print(raise_open_files_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 4096), (4096, 4096)])
def test_the_limit_is_raised_to_the_highest_allowed(soft: int, hard: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["4096", "4096", "4096"]


@pytest.fixture
def _own_garbage_collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_own_garbage_collector")
def test_listing_thousands_of_pods_starts_few_garbage_collections() -> None:
    collections: list[str] = []

    def count(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    collect_garbage_less_often()
    gc.callbacks.append(count)
    try:
        InformerCache().replace(POD, None, (pod(number) for number in range(2000)), "9999")
    finally:
        gc.callbacks.remove(count)
    assert collections.count("start") < 10


def pod(number: int) -> Object:
    metadata = {"name": f"pod-{number}", "namespace": "team", "resourceVersion": str(number), "labels": {"a": "b"}}
    containers = [{"name": "engine", "resources": {"limits": {}}, "ports": [{}]} for _ in range(5)]
    return {"metadata": metadata, "spec": {"containers": containers}, "status": {"conditions": [{} for _ in range(9)]}}


@contextlib.asynccontextmanager
async def block() -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.sleep(0)


async def infinite_watch() -> AsyncIterator[int]:
    """Yield from inside another generator, as kopf's does."""
    async with block():
        while True:
            yield 1


@pytest.mark.parametrize("silent", [False, True])
def test_a_watch_that_is_open_at_the_end_is_not_reported_as_an_error(
    silent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream = infinite_watch()

    async def run() -> None:
        if silent:
            end_generators_silently(asyncio.get_running_loop())
        await anext(stream)
        if silent:
            asyncio.get_running_loop().call_exception_handler({"message": "another error"})

    asyncio.run(run())
    if silent:
        assert [record.message for record in caplog.records] == ["another error"]
    else:
        assert "closing of asynchronous generator" in caplog.text


# Sends itself SIGTERM after kopf has installed its own signal handlers, and ends when it is told to stop.
SIGNALLED = """
import asyncio, os, signal
import kopf
from fastgen_operator.runtime.process import hold_stop_signals, stop_on_signals

async def run():
    stopped, has_started = asyncio.Event(), asyncio.Event()
    stop_on_signals(stopped.set)
    registry = kopf.OperatorRegistry()
    watching = asyncio.create_task(kopf.operator(registry=registry, clusterwide=True, ready_flag=has_started))
    await has_started.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await stopped.wait()
    print("stopped; kopf has ended:", watching.done())
    os._exit(0)

hold_stop_signals()
asyncio.run(run())
"""


def test_a_signal_stops_the_operator_although_kopf_has_started_meanwhile() -> None:
    """A signal that ended only the watches would leave an operator that keeps the Lease until it is killed."""
    result = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout == "stopped; kopf has ended: False\n"


def test_a_signal_that_came_early_is_not_lost() -> None:
    program = SIGNALLED.replace("asyncio.run(run())", "os.kill(os.getpid(), signal.SIGINT)\nasyncio.run(run())")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.startswith("stopped")
