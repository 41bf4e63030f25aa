"""Reads the tokens in flight from the replicas themselves, before some of them are deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.scraper import Scraped, Scraper, Target
from fastgen_operator.objects.pod import Pod

logger = logging.getLogger(__name__)

# A scale-down waits this long for each 32 replicas that do not answer.
_SECONDS: Final = 2.0


def read_loads(pods: Sequence[Pod], model_name: str) -> dict[str, float]:
    """Return the tokens in flight by pod name, without the pods that gave no usable answer in time."""
    addresses = {pod.name: pod.address for pod in pods}
    targets = [Target(name, address, model_name) for name, address in addresses.items() if address]
    if not targets:
        return {}
    loads = {}
    for target, answer in asyncio.run(_scrape(targets)).items():
        if isinstance(answer, Sample):
            loads[target.pod] = answer.in_flight_tokens
        else:
            logger.debug("pod %s: reading its load: %s: %s", target.pod, answer.reason, answer)
    return loads


async def _scrape(targets: Sequence[Target]) -> dict[Target, Scraped]:
    async with Scraper(_SECONDS) as scraper:
        return await scraper.scrape("", targets)
