"""The operator stays below the chart's memory limit, whatever its tenants store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import FASTGEN
from harness.chart import CHART, operator_kubeconfig
from harness.hostile import refusal
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.slow, pytest.mark.usefixtures("unattended")]

RESOURCES = 200
LIMIT = yaml.safe_load((CHART / "values.yaml").read_text())["operator"]["resources"]["limits"]["memory"]


@pytest.fixture
def operator(plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[OperatorProcess]:
    started = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ("--namespace", space.name))
    yield started
    started.abandon()


def small_maps() -> Object:
    """Return a pod spec of the most maps that admission accepts: they take the most memory for their text."""
    return {f"m{part}": {f"k{number:03}": {"a": 1} for number in range(186)} for part in range(21)}


def variables() -> Object:
    """Return a pod spec of about the most environment variables that admission accepts, in one container each 900."""
    values = [[{"name": f"v{part}{number:03}"} for number in range(900)] for part in range(3)]
    containers = [{"name": f"c{part}", "image": "x", "env": env} for part, env in enumerate(values)]
    return {"containers": containers}


def test_200_of_the_largest_resources_fit_into_the_memory_limit(space: Space, operator: OperatorProcess) -> None:
    shapes = small_maps(), variables()
    more = {**small_maps(), "another": next(iter(small_maps().values()))}
    assert "above 65536" in refusal(space, "x", json.dumps(more)), "these are the largest"
    notes = {f"example.com/{number}": "x" * 40_000 for number in range(6)}

    def store(number: int) -> None:
        body = resource(f"large-{number}", replicas=0, podTemplate={"spec": shapes[number % 10 == 0]})
        body["metadata"]["annotations"] = notes
        space.server.request("POST", FASTGEN.path(space.name), body=body, content_type="application/json")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(store, range(RESOURCES)))
    operator.start()

    def handled() -> int:
        _, found = space.server.list(FASTGEN.path(space.name), [])
        return sum("conditions" in each["status"] for each in found)

    eventually(lambda: handled() > 30, within=300, what="reconciles of large resources by all workers", every=2)
    assert operator.peak_memory() < int(LIMIT.removesuffix("Mi")) << 20
    assert "Traceback" not in operator.log.read_text()
