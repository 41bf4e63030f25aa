"""Every query of the dashboards finds data in a real Prometheus that scrapes a real engine and the real operator."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.files import rendered
from dashboards.queries import Query, event_queries, fill, panel_queries, variable_queries
from engine.server.serving import REAL, Serving, serving  # type: ignore[import-untyped]
from fastgen_operator.objects.container import HTTP_PORT
from harness.loopback import LOOPBACK
from harness.monitored_fleet import CACHED, MonitoredFleet, scaled
from harness.process import OperatorProcess
from harness.prometheus import Prometheus, prometheus
from harness.space import Space
from support.small_model import save_small_model
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

# $__rate_interval. Long, because a slow machine scrapes and asks seldom.
RATE_SECONDS = 30
# Nothing serves at the second one: the operator fails to scrape it.
ADDRESSES = (next(LOOPBACK), next(LOOPBACK))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Serving]:
    """Run the real engine with a small model, at a pod's address."""
    options = ("--served-model-name", "chat", "--max-model-length", "512", "--kv-cache-memory", "16MiB")
    model = str(save_small_model(tmp_path / "model"))
    with serving(tmp_path, *options, command=REAL, model=model, host=ADDRESSES[0], port=HTTP_PORT) as server:
        server.wait_status("/ready", 200, seconds=240)
        yield server


class Answers:
    """All queries of all dashboards, and those that have found no data yet."""

    def __init__(self, source: Prometheus, space: str) -> None:
        self._source = source
        self._variables = {"namespace": space, "deployment": "chat", "pod": ".*", "__rate_interval": f"{RATE_SECONDS}s"}
        self._began = time.time()
        # tests/gateway/test_dashboard.py asks those of the gateway.
        self._dashboards = [json.loads(text) for name, text in rendered().items() if name != "fastgen-gateway.json"]
        panels = [panel for dashboard in self._dashboards for panel in dashboard["panels"]]
        self._queries = [query for panel in panels for query in panel_queries(panel)]
        self._queries += [query for dashboard in self._dashboards for query in event_queries(dashboard)]
        self._choices = [choice for dashboard in self._dashboards for choice in variable_queries(dashboard)]
        assert len(self._queries) > 100

    def missing(self) -> list[str]:
        """Ask the queries again that have found nothing, and return those that still find nothing."""
        self._queries = [query for query in self._queries if self._is_empty(query)]
        self._choices = [
            (selector, label)
            for selector, label in self._choices
            if not self._source.label_values(fill(selector, self._variables), label)
        ]
        return [f"{each.title}: {each.expression}" for each in self._queries] + [
            f"{label} of {selector}" for selector, label in self._choices
        ]

    def _is_empty(self, query: Query) -> bool:
        seconds = time.time() - self._began
        series = self._source.series(fill(query.expression, self._variables), seconds=seconds)
        values = [float(value) for each in series for _, value in each["values"]]
        # A legend without its labels could not tell the series apart.
        assert all(query.name(each["metric"]).strip() for each in series), query
        return all(math.isnan(value) for value in values)


# Panels without data while all kinds can be read, and without a gateway.
_WITHOUT_DATA = ("Kinds that cannot be read", "Held requests", "Failed polls of the gateway")


def test_every_query_of_the_dashboards_finds_data(
    space: Space, operator: OperatorProcess, engine: Serving, tmp_path: Path
) -> None:
    ask = {"model": "chat", "prompt": "one two three four", "max_tokens": 8}
    missing: list[str] = []
    with prometheus(tmp_path) as source:
        fleet = MonitoredFleet(space, operator, source, ADDRESSES)
        answers = Answers(source, space.name)
        # A download, and the rollout of the first pod, which has to wait until Prometheus has seen it.
        fleet.admit()
        space.apply(CACHED)
        space.apply(scaled(1))
        rollout = f'fastgen_operator_condition{{namespace="{space.name}",name="chat",reason="RollingOut"}}'
        eventually(lambda: source.series(rollout, seconds=5), within=30, what="the rollout")
        # Any pod may be replaced before it is ready.
        eventually(lambda: fleet.admit() and space.condition("Ready").get("status") == "True", within=30, what="Ready")

        def only(*titles: str) -> bool:
            """Cause some traffic, and return whether no query is without data but those with these titles."""
            fleet.admit()
            assert engine.post("/v1/completions", ask).status_code == 200
            assert engine.post("/v1/completions", {**ask, "model": "another"}).status_code == 404
            missing[:] = answers.missing()
            return all(each.startswith((*_WITHOUT_DATA, *titles)) for each in missing)

        try:
            eventually(lambda: only("Scaling decisions", "Failed scrapes"), within=90, what="data for every panel")
            # A decision: the metrics have shown the number before it. No engine serves at the second pod's address.
            space.apply(scaled(2))
            eventually(only, within=90, what="the decision")
        except TimeoutError:
            pytest.fail("no data for\n" + "\n".join(missing))
