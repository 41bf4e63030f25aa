"""The operator stays below the chart's memory limit, whatever its tenants store."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
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


def store_copies(plane: ControlPlane, space: Space, name: str, copies: list[str]) -> None:
    """Store copies of a resource straight in etcd: the API server takes half a second of a core to admit each."""
    folder = f"/registry/{FASTGEN.group}/{FASTGEN.plural}/{space.name}/"
    with httpx.Client(base_url=f"http://127.0.0.1:{plane.site.etcd}/v3/kv/", timeout=60) as etcd:

        def request(action: str, **fields: bytes) -> Object:
            body = {field: base64.b64encode(value).decode() for field, value in fields.items()}
            answer: Object = etcd.post(action, json=body).raise_for_status().json()
            return answer

        (stored,) = request("range", key=f"{folder}{name}".encode())["kvs"]
        value = json.loads(base64.b64decode(stored["value"]))
        for copy in copies:
            value["metadata"] |= {"name": copy, "uid": str(uuid.uuid4())}
            request("put", key=f"{folder}{copy}".encode(), value=json.dumps(value).encode())


def test_200_of_the_largest_resources_fit_into_the_memory_limit(
    plane: ControlPlane, space: Space, operator: OperatorProcess
) -> None:
    more = {**small_maps(), "another": next(iter(small_maps().values()))}
    assert "above 65536" in refusal(space, "x", json.dumps(more)), "these are the largest"
    shapes = [(small_maps(), RESOURCES * 9 // 10), (variables(), RESOURCES // 10)]
    for shape, (pod_spec, count) in enumerate(shapes):
        first, *copies = [f"large-{shape}-{number}" for number in range(count)]
        body = resource(first, replicas=0, podTemplate={"spec": pod_spec})
        body["metadata"]["annotations"] = {f"example.com/{number}": "x" * 40_000 for number in range(6)}
        space.server.request("POST", FASTGEN.path(space.name), body=body, content_type="application/json")
        store_copies(plane, space, first, copies)
    operator.launch()

    def handled() -> int:
        """Return the number of resources with conditions, from the metrics: the list itself has 60 MB."""
        shown = (labels for name, labels in operator.metrics() if name == "fastgen_operator_condition")
        return sum(labels.endswith("/Ready") for labels in shown)

    eventually(lambda: handled() > 30, within=300, what="reconciles of large resources by all workers", every=0.5)
    assert operator.peak_memory() < int(LIMIT.removesuffix("Mi")) << 20
    assert "Traceback" not in operator.log.read_text()
