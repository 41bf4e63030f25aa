"""Every query of the dashboard finds data in a real Prometheus that scrapes a real engine and the real operator."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards.files import rendered
from engine.server.serving import REAL, Serving, serving  # type: ignore[import-untyped]
from harness.process import OperatorProcess
from harness.prometheus import Prometheus, Target, prometheus
from harness.space import Space, resource
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

# Grafana's value for $__rate_interval: at least four scrape intervals.
RATE_SECONDS = 8


# The operator scrapes a pod at the pod's address, on the engine's port.
POD_ADDRESS, PORT = "127.83.1.1", 8000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Serving]:
    """Run the real engine with the demo model, at a pod's address."""
    options = ("--served-model-name", "chat", "--max-model-length", "512", "--kv-cache-memory", "64MiB")
    with serving(tmp_path, *options, command=REAL, host=POD_ADDRESS, port=PORT) as server:
        server.wait_status("/ready", 200, seconds=240)
        yield server


def panels() -> Iterator[tuple[str, str]]:
    """Return title and query of every panel of every dashboard."""
    for text in rendered().values():
        for panel in json.loads(text)["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], target["expr"]


def has_data(series: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(value)) for each in series for _, value in each["values"])


def without_data(source: Prometheus, space: str) -> list[str]:
    """Return the panels whose query finds nothing, with the query."""
    empty = []
    for title, template in panels():
        query = template.replace("$namespace", space).replace("$deployment", "chat")
        query = query.replace("$__rate_interval", f"{RATE_SECONDS}s")
        assert "$" not in query, f"{title}: a variable that the test does not know"
        if not has_data(source.series(query, seconds=RATE_SECONDS)):
            empty.append(f"{title}: {query}")
    return empty


def test_every_query_of_the_dashboard_finds_data(
    space: Space, operator: OperatorProcess, engine: Serving, tmp_path: Path
) -> None:
    space.apply(resource(autoscaling={"minReplicas": 1, "maxReplicas": 3}))
    space.make_ready()
    (pod,) = space.wait_pods(1)
    address = {"podIP": POD_ADDRESS, "podIPs": [{"ip": POD_ADDRESS}]}
    space.patch(f"pod/{pod['metadata']['name']}", {"status": address}, "status")
    space.wait_condition("Ready", "True")
    # The labels that the PodMonitors of the operator and of the chart add.
    labels = {"namespace": space.name, "pod": pod["metadata"]["name"], "fastgen_dev_deployment": "chat"}
    targets = [
        Target(f"{POD_ADDRESS}:{PORT}", labels),
        Target(f"127.0.0.1:{operator.metrics_port}", {"namespace": "fastgen-system"}, honour=True),
    ]
    ask = {"model": "chat", "prompt": "one two three four", "max_tokens": 8}

    def all_found() -> bool:
        # Some traffic for the rates, and a request that is rejected.
        assert engine.post("/v1/completions", ask).status_code == 200
        assert engine.post("/v1/completions", {**ask, "model": "another"}).status_code == 404
        missing[:] = without_data(source, space.name)
        return not missing

    missing: list[str] = []
    with prometheus(tmp_path, targets) as source:
        try:
            eventually(all_found, within=40, what="data for every panel", every=0.5)
        except TimeoutError:
            pytest.fail("no data for\n" + "\n".join(missing))
