"""Scrapes of replicas are spread over time, and no replica delays those of others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from fastgen_gateway import scraping
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.router import Router
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.scraper import Target
from support.waiting import PATIENCE

HANGS, ANSWERS = "10.0.0.1:8000", "10.0.0.2:8000"


def test_groups_are_equal_and_have_each_replica_once() -> None:
    fleets = [
        (("ns", f"m{fleet}"), f"m{fleet}", [f"10.0.{fleet}.{number}:8000" for number in range(7 * fleet)])
        for fleet in range(9)
    ]
    found = scraping.groups(fleets)
    sizes = [sum(len(targets) for targets in group.values()) for group in found]
    assert sum(sizes) == sum(len(addresses) for _, _, addresses in fleets)
    assert max(sizes) - min(sizes) <= 1
    scraped = {(key, target.pod) for group in found for key, targets in group.items() for target in targets}
    assert scraped == {(key, address) for key, _, addresses in fleets for address in addresses}


class StandIn:
    """Stand-in for the scraper. One replica never answers."""

    def __init__(self, _: float) -> None:
        self.asked: Counter[str] = Counter()
        self.enough = asyncio.Event()

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def scrape(self, _: str, targets: Collection[Target]) -> dict[Target, UnusableError]:
        for target in targets:
            self.asked[target.pod] += 1
            if target.pod == HANGS:
                await asyncio.Event().wait()
        if self.asked[ANSWERS] == 5:
            self.enough.set()
        return {target: UnusableError("Unreachable", "") for target in targets}


def test_a_replica_that_does_not_answer_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StandIn] = []

    def make(period: float) -> Any:
        made.append(StandIn(period))
        return made[-1]

    monkeypatch.setattr(scraping, "Scraper", make)
    monkeypatch.setattr(scraping, "_PERIOD_SECONDS", 0.01)

    async def run() -> None:
        router = Router(lambda: 0.0, HoldLimits())
        router.set_deployments([Exposed("ns", "m", "m", "2026-01-01T00:00:00Z")])
        router.set_endpoints(("ns", "m"), [HANGS, ANSWERS])
        metrics = Metrics(router, ClientLimits(lambda: 0.0))
        task = asyncio.create_task(scraping.scrape_replicas(router, metrics, lambda: None))
        await asyncio.sleep(0)
        await asyncio.wait_for(made[0].enough.wait(), 20 * PATIENCE)
        assert made[0].asked[HANGS] == 1, "it is not asked again before it has answered"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
