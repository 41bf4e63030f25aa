"""Scrape the replicas, as the operator does, so that choices know their load."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Final

from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.router import Router
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.scraper import Scraper, Target
from fastgen_operator.kinds import Key

# Between the starts of two scrapes of a replica: what a choice knows is at most a second old.
_PERIOD_SECONDS: Final = 0.5
# No request is routed while responses are parsed, so the scrapes are spread over the period: one group at a time.
_GROUPS: Final = 25

_Fleets = Mapping[Key, Sequence[Target]]


async def scrape_replicas(router: Router, metrics: Metrics, changed: Callable[[], None]) -> None:
    """Scrape all ready replicas twice a second until cancelled; call `changed` after each group of them."""

    async def scrape(number: int, fleets: _Fleets) -> None:
        await asyncio.gather(*(_scrape(scraper, router, metrics, number, *fleet) for fleet in fleets.items()))
        changed()

    running: dict[int, asyncio.Task[None]] = {}
    async with Scraper(_PERIOD_SECONDS) as scraper, asyncio.TaskGroup() as tasks:
        while True:
            began = time.monotonic()
            for number, fleets in enumerate(groups(router.endpoints())):
                if fleets:
                    await _until(began + number * _PERIOD_SECONDS / _GROUPS)
                    # A replica that does not answer delays its own group only.
                    if number not in running or running[number].done():
                        running[number] = tasks.create_task(scrape(number, fleets))
            await _until(began + _PERIOD_SECONDS)


def groups(endpoints: Iterable[tuple[Key, str, Iterable[str]]]) -> list[_Fleets]:
    """Split the replicas of `Router.endpoints` into groups. Their sizes differ by at most one."""
    found: list[defaultdict[Key, list[Target]]] = [defaultdict(list) for _ in range(_GROUPS)]
    number = count()
    for key, model, addresses in endpoints:
        for address in addresses:
            found[next(number) % _GROUPS][key].append(_target(address, model))
    return list(found)


async def _scrape(
    scraper: Scraper, router: Router, metrics: Metrics, number: int, key: Key, targets: Sequence[Target]
) -> None:
    began = time.monotonic()
    answers = await scraper.scrape(f"{'/'.join(key)} {number}", targets)
    for target, answer in answers.items():
        if isinstance(answer, Sample):
            router.observe(key, target.pod, answer, began)
        else:
            metrics.scrape_failed(key, answer.reason)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _target(address: str, model: str) -> Target:
    host, _, port = address.rpartition(":")
    return Target(address, host.strip("[]"), model, int(port))
