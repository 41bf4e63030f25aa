"""The operator stays below the chart's memory limit, whatever its tenants store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.controlplane import ControlPlane
from harness.chart import CHART, operator_kubeconfig
from harness.hostile import refusal
from harness.largest import small_maps, store_largest
from harness.process import OperatorProcess
from harness.space import Space
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.slow, pytest.mark.usefixtures("unattended")]

RESOURCES = 200
LIMIT = yaml.safe_load((CHART / "values.yaml").read_text())["operator"]["resources"]["limits"]["memory"]


@pytest.fixture
def operator(plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[OperatorProcess]:
    started = OperatorProcess(operator_kubeconfig(plane), tmp_path / "log", ("--namespace", space.name))
    yield started
    started.abandon()


def test_200_of_the_largest_resources_fit_into_the_memory_limit(
    plane: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    more = {**small_maps(), "another": next(iter(small_maps().values()))}
    assert "above 65536" in refusal(space, "x", json.dumps(more)), "these are the largest"
    store_largest(space, plane.site.etcd, RESOURCES)
    operator.launch()

    def handled() -> int:
        """Return the number of resources with conditions, from the metrics: the list itself has 60 MB."""
        shown = (labels for name, labels in operator.metrics() if name == "fastgen_operator_condition")
        return sum(labels.endswith("/Ready") for labels in shown)

    eventually(lambda: handled() > 30, within=300, what="reconciles of large resources by all workers", every=0.5)
    assert operator.peak_memory() < int(LIMIT.removesuffix("Mi")) << 20
    assert "Traceback" not in operator.log.read_text()
