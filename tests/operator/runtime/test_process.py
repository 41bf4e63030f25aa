"""The settings of the operator's process: open files as container runtimes limit them, and garbage collections."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fastgen_operator.kinds import POD, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.runtime.process import collect_garbage_less_often

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
