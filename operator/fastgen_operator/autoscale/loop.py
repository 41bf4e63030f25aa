"""The autoscaler's loop: scrape fleets, decide, read loading stages, queue resources with an outdated status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.scraper import Scraped, Scraper, Target
from fastgen_operator.autoscale.supply import LoadingStage
from fastgen_operator.autoscale.watchlist import Record, Subject, Watchlist
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.pod import Pod

logger = logging.getLogger(__name__)

# Fleets without autoscaling are scraped once in this many intervals, because only their status depends on it. The
# default is one minute, less than the 75 s after which an engine closes a connection.
FIXED_PERIODS: Final = 12
# The stage of a loading engine is read once in this many intervals: each change is a write of the status.
STAGE_PERIODS: Final = 2


@dataclass(slots=True)
class Autoscaler:
    """Measures all fleets, and sizes those with autoscaling.

    Each fleet is measured by a task of its own, so that none waits for the replicas of another.

    Attributes:
        wake: queues a reconcile.
        now: returns the time, with a time zone, as in the objects of the cluster.
    """

    watchlist: Watchlist
    scraper: Scraper
    metrics: Metrics
    wake: Callable[[Key], None]
    now: Callable[[], datetime]
    _running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    _reading: dict[Key, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Scrape and decide periodically until cancelled."""
        period = self.watchlist.scrape_seconds
        async with self.scraper:
            try:
                await asyncio.gather(
                    _repeat(period, lambda: self._begin(lambda subject: subject.is_autoscaled)),
                    _repeat(FIXED_PERIODS * period, lambda: self._begin(lambda subject: not subject.is_autoscaled)),
                    _repeat(STAGE_PERIODS * period, self._begin_reading),
                )
            finally:
                for task in (*self._running.values(), *self._reading.values()):
                    task.cancel()

    async def run_once(self, chosen: Callable[[Subject], bool] = lambda _: True) -> None:
        """Scrape all chosen fleets once, and decide on those with autoscaling. Skip those being scraped."""
        await asyncio.gather(*self._begin(chosen))

    def _begin(self, chosen: Callable[[Subject], bool]) -> list[asyncio.Task[None]]:
        """Begin to measure the chosen fleets, except those whose last measurement is not complete."""
        begun = []
        for key, subject in self.watchlist.subjects():
            if chosen(subject) and key not in self._running:
                self._running[key] = asyncio.create_task(self._measure(key, subject))
                begun.append(self._running[key])
        return begun

    def _begin_reading(self) -> list[asyncio.Task[None]]:
        """Begin to read the stages of loading engines, one of each fleet, except those whose last read is running."""
        begun = []
        for key, subject in self.watchlist.subjects():
            if (pod := subject.loading) is not None and pod.address and key not in self._reading:
                self._reading[key] = asyncio.create_task(self._read_stage(key, pod, pod.address))
                begun.append(self._reading[key])
        return begun

    async def _read_stage(self, key: Key, pod: Pod, address: str) -> None:
        """Read what the engine of a loading pod does; request a new status when that changes.

        If the engine does not answer, its last answer stays.
        """
        try:
            text = await self.scraper.read_stage(address)
            if text and self.watchlist.set_loading_stage(key, LoadingStage(pod.name, pod.engine.running_since, text)):
                self.wake(key)
        finally:
            del self._reading[key]

    async def _measure(self, key: Key, subject: Subject) -> None:
        """Scrape a fleet, and decide on it if it has autoscaling."""
        try:
            answers = await self.scraper.scrape("/".join(key), _targets(subject))
            if (record := self.watchlist.open_record(key, subject)) is not None:
                self._update(key, subject, record, answers)
        except Exception:
            # A failure must not stop autoscaling.
            logger.exception("%s/%s: scraping and sizing the fleet", *key)
        finally:
            del self._running[key]

    def _update(self, key: Key, subject: Subject, record: Record, answers: dict[Target, Scraped]) -> None:
        samples: dict[str, Sample | None] = {}
        for target, answer in answers.items():
            samples[target.pod] = answer if isinstance(answer, Sample) else None
            if isinstance(answer, UnusableError):
                self.metrics.scrape_failures.labels(answer.reason).inc()
                logger.debug("%s/%s: metrics of pod %s: %s: %s", *key, target.pod, answer.reason, answer)
        if any(samples.values()):
            self.metrics.mark_scraped(key)
        elif subject.replicas == 0:
            self.metrics.clear_scrape(key)
        before = record.decision
        changed = record.update(subject, samples, asyncio.get_running_loop().time(), self.now().timestamp())
        decision = record.decision
        self.metrics.set_stragglers(key, {each.pod: each.share for each in record.speeds.stragglers})
        self.metrics.set_load(key, None if decision is None else decision.load)
        self.metrics.set_recommended(key, None if decision is None else decision.replicas)
        if decision is not None:
            self._count(key, record, before, decision, "recommended: " if subject.is_dry_run else "")
        if changed:
            self.wake(key)

    def _count(self, key: Key, record: Record, before: Decision | None, decision: Decision, prefix: str) -> None:
        """Count a decision if its reason or its replicas changed; log it if the replicas changed or are held."""
        last = decision.hold or decision.change
        reason = "Steady" if last is None else last.reason
        changed = before is not None and before.replicas != decision.replicas
        if reason == record.shown and not changed:
            return
        record.shown = reason
        self.metrics.count_decision(key, reason)
        if changed and before is not None and decision.change is not None:
            words = (prefix, before.replicas, decision.replicas, decision.change.message)
            logger.info("%s/%s: %sfrom %d to %d replicas: %s", *key, *words)
        elif decision.hold is not None:
            logger.info("%s/%s: %sheld at %d replicas: %s", *key, prefix, decision.replicas, decision.hold.message)


async def _repeat(period: float, begin: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        begin()
        await asyncio.sleep(max(0.0, began + period - loop.time()))


def _targets(subject: Subject) -> tuple[Target, ...]:
    return tuple(
        Target(pod.name, address, subject.model_name)
        for pod in subject.pods
        if (address := pod.address) and pod.ready_since is not None and not pod.is_terminating
    )
