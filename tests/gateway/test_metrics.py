"""Series of the gateway's metrics begin and end with what they are about."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics import MetricWrapperBase

from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.request_body import RequestBody
from fastgen_gateway.routing.router import Choice, Router


class Bench:
    """Metrics of a router."""

    def __init__(self) -> None:
        self.router = Router(lambda: 0.0, HoldLimits())
        self.limits = ClientLimits(lambda: 0.0)
        self.metrics = Metrics(self.router, self.limits)

    def series(self) -> list[str]:
        """Return the series with labels of a deployment or client."""
        generate_latest(self.metrics.registry)  # as the scrape before
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return [line for line in lines if 'name="x"' in line or 'client="c"' in line]


def test_series_begin_at_zero_before_the_first_event() -> None:
    bench = Bench()
    bench.router.set_deployments([Exposed("ns", "x", "m", "2026-01-01T00:00:00Z")])
    bench.limits.set_clients([Client("c")])
    shown = bench.series()
    for line in (
        'fastgen_gateway_requests_total{name="x",namespace="ns",outcome="routed"} 0.0',
        'fastgen_gateway_retries_total{name="x",namespace="ns"} 0.0',
        'fastgen_gateway_hold_seconds_count{name="x",namespace="ns"} 0.0',
        'fastgen_gateway_client_requests_total{client="c",outcome="routed"} 0.0',
    ):
        assert line in shown


def test_series_end_with_the_deployment_and_the_client() -> None:
    bench = Bench()
    bench.router.set_deployments([Exposed("ns", "x", "m", "2026-01-01T00:00:00Z")])
    bench.router.set_endpoints(("ns", "x"), ["10.0.0.1:8000"])
    client = Client("c")
    bench.limits.set_clients([client])
    assert bench.series()
    choice = bench.router.arrive(RequestBody("m", 1, 1, ()))
    assert isinstance(choice, Choice)
    bench.metrics.routed(choice, client)
    bench.metrics.answered(choice, "10.0.0.2:8000")
    bench.metrics.scrape_failed(choice.key, "Timeout")
    bench.metrics.used("c", 1, 2)
    assert len(bench.series()) > 10
    bench.router.set_deployments([])
    bench.limits.set_clients([])
    assert bench.series() == []
    # Its last requests end later.
    bench.metrics.answered(choice, "10.0.0.2:8000")
    bench.metrics.used("c", 1, 2)
    assert bench.series() == []


def test_many_deployments_that_are_gone_do_not_stop_the_next_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all series for each of a thousand took longer than the scrape may, and requests waited."""
    searched: list[Mapping[str, str]] = []

    def search(_: MetricWrapperBase, labels: Mapping[str, str]) -> None:
        searched.append(labels)

    monkeypatch.setattr(MetricWrapperBase, "remove_by_labels", search)
    bench = Bench()
    bench.router.set_deployments(Exposed("ns", f"x{number}", "m", "2026-01-01T00:00:00Z") for number in range(50))
    generate_latest(bench.metrics.registry)
    bench.metrics.scrape_failed(("ns", "x1"), "Timeout")
    assert b'name="x1"' in generate_latest(bench.metrics.registry)
    bench.router.set_deployments([])
    generate_latest(bench.metrics.registry)
    assert b'name="x' not in generate_latest(bench.metrics.registry)
    assert searched == []
