"""Every query of the gateway's dashboard finds data in a real Prometheus that scrapes a real gateway."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.files import rendered
from dashboards.queries import fill, panel_queries, variable_queries
from gateway.gateway_pod import GatewayPod, client_options, expose, wait_for_ready
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from harness.prometheus import Prometheus, Target, prometheus
from support.waiting import wait_until

Pair = tuple[ReplicaStandIn, ReplicaStandIn]
DASHBOARD = json.loads(rendered()["fastgen-gateway.json"])
# Long enough for a slow machine, on which scrapes and requests are rare.
RATE_SECONDS = 60
VARIABLES = {"pod": ".*", "__rate_interval": f"{RATE_SECONDS}s"}


@pytest.fixture
def keyed(_api: ApiServerStandIn, tmp_path: Path) -> Iterator[GatewayPod]:
    """A gateway with a client `team`, which may send one request at a time."""
    options = client_options(tmp_path, {"team": "key"}, {"defaults": {"concurrentRequests": 1}})
    started = GatewayPod(tmp_path, _api.url, options)
    started.start()
    yield started
    started.stop()


def has_data(source: Prometheus, expression: str) -> bool:
    series = source.series(fill(expression, VARIABLES), seconds=RATE_SECONDS)
    return any(not math.isnan(float(value)) for each in series for _, value in each["values"])


def fail_a_watch(pod: GatewayPod, api: ApiServerStandIn) -> None:
    """Let the API server reject a watch. The change before makes the picker begin with short pauses again."""

    def failures() -> list[str]:
        return [line for line in pod.metrics().splitlines() if line.startswith("fastgen_gateway_watch_failures_total")]

    api.deployment("m")
    before = failures()
    api.status = 500
    api.end_watches()
    wait_until(lambda: failures() != before, "the picker has counted a failure", 60)
    api.status = 200


def hold(pod: GatewayPod, api: ApiServerStandIn, replica: ReplicaStandIn) -> None:
    """Let a request wait for a replica of the model `held`, and another one exceed the limit of its client."""
    api.endpoints("held")
    wait_for_ready(pod, "held", 0)
    running = 'fastgen_gateway_client_requests_running{client="team"} 0.0'
    wait_until(lambda: running in pod.metrics(), "the request before has ended")
    waiting = HeldClients(pod.ports.front, 1, {"model": "held"}, "Authorization: Bearer key")
    wait_until(lambda: pod.demand()["deployments"]["default/held"]["held"] == 1, "the request is held")
    assert pod.ask("held", key="key").status_code == 429
    api.endpoints("held", replica.address)
    assert waiting.wait() == {200: 1}


def test_every_query_of_the_dashboard_finds_data(
    keyed: GatewayPod, api: ApiServerStandIn, replicas: Pair, tmp_path: Path
) -> None:
    queries = [query for panel in DASHBOARD["panels"] for query in panel_queries(panel)]
    assert len(queries) > 15
    api.deployment("held")
    with prometheus(tmp_path) as source:
        source.scrape([Target(f"127.0.0.1:{keyed.http_port}", {"pod": "gateway-1"}, honour=True)])
        hold(keyed, api, replicas[0])
        seen = "fastgen_gateway_hold_seconds_count{}"
        wait_until(lambda: has_data(source, seen), "Prometheus has seen the first hold: rates begin with it", 60)
        hold(keyed, api, replicas[0])
        expose(api, keyed, "m", *replicas)
        replicas[0].mode = "draining"
        missing = [(query.title, query.expression) for query in queries]

        def all_found() -> bool:
            """Cause some traffic, and ask the queries again that have found nothing."""
            keyed.ask("m", key="key", usage=[3, 4])
            keyed.ask("none", key="key")
            fail_a_watch(keyed, api)
            missing[:] = [each for each in missing if not has_data(source, each[1])]
            return not missing

        try:
            wait_until(all_found, "all queries find data", 120)
        except TimeoutError:
            pytest.fail(f"no data for {missing}")
        for selector, label in variable_queries(DASHBOARD):
            assert source.label_values(selector, label) == ["gateway-1"]
