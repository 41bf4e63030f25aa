"""Scrape the replicas, as the operator does, so that choices know their load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.router import Router
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.scraper import Scraper, Target
from fastgen_operator.kinds import Key

# Between the starts of two scrapes of a replica: what a choice knows is at most a second old.
_PERIOD_SECONDS: Final = 0.5

logger = logging.getLogger(__name__)


async def scrape_replicas(router: Router, metrics: Metrics, changed: Callable[[], None]) -> None:
    """Scrape all ready replicas twice a second until cancelled; call `changed` after each round."""
    async with Scraper(_PERIOD_SECONDS) as scraper:
        while True:
            began = time.monotonic()
            fleets = [(key, model, addresses) for key, model, addresses in router.endpoints() if addresses]
            await asyncio.gather(*(_scrape(scraper, router, metrics, *fleet) for fleet in fleets))
            if fleets:
                changed()
            await asyncio.sleep(max(0.0, began + _PERIOD_SECONDS - time.monotonic()))


async def _scrape(
    scraper: Scraper, router: Router, metrics: Metrics, key: Key, model: str, addresses: tuple[str, ...]
) -> None:
    targets = [_target(address, model) for address in addresses]
    began = time.monotonic()
    answers = await scraper.scrape("/".join(key), targets)
    for target, answer in answers.items():
        if isinstance(answer, Sample):
            router.observe(key, target.pod, answer, began)
        else:
            metrics.scrape_failed(key, answer.reason)


def _target(address: str, model: str) -> Target:
    host, _, port = address.rpartition(":")
    return Target(address, host.strip("[]"), model, int(port))
