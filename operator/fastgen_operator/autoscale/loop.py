"""The autoscaler's loop: scrape all fleets, decide, and queue the resources whose decision changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.autoscale.recommend import recommend
from fastgen_operator.autoscale.scrape import Scraper, Target, UnusableError, metrics_url
from fastgen_operator.autoscale.watchlist import Record, Subject, Watchlist
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Autoscaler:
    """Sizes all fleets of a watchlist.

    Attributes:
        wake: queues a resource for a reconcile.
    """

    watchlist: Watchlist
    scraper: Scraper
    metrics: Metrics
    wake: Callable[[Key], None]

    async def run(self) -> None:
        """Scrape and decide periodically until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.run_once()
            except Exception:
                # A failure must not stop the autoscaling of all fleets.
                logger.exception("scraping and sizing the fleets")
            await asyncio.sleep(max(0.0, began + self.watchlist.scrape_seconds - loop.time()))

    async def run_once(self) -> None:
        """Scrape every fleet once, and decide for each."""
        subjects = self.watchlist.subjects()
        targets = {key: _targets(subject) for key, subject in subjects}
        answers = await self.scraper.scrape(target for of_one in targets.values() for target in of_one)
        for key, subject in subjects:
            record = self.watchlist.open_record(key, subject.uid)
            if record is not None:
                self._store_samples(key, record, [(target, answers[target]) for target in targets[key]])
                self._decide(key, subject, record)
            # Yield between fleets: thousands of decisions would block the probes and watches in this loop.
            await asyncio.sleep(0)

    def _store_samples(self, key: Key, record: Record, answers: list[tuple[Target, Sample | UnusableError]]) -> None:
        usable = {target.pod: answer for target, answer in answers if isinstance(answer, Sample)}
        pods = {target.pod for target, _ in answers}
        kept = {pod: sample for pod, sample in record.samples.items() if pod in pods}
        # Replaced as a whole: a reconcile may read it in another thread.
        record.samples = {**kept, **usable}
        if usable:
            self.metrics.mark_scraped(key)
        failures = [(target, answer) for target, answer in answers if isinstance(answer, UnusableError)]
        for target, error in failures:
            self.metrics.scrape_failures.labels(error.reason).inc()
            logger.debug("%s/%s: metrics of pod %s: %s: %s", *key, target.pod, error.reason, error)

    def _decide(self, key: Key, subject: Subject, record: Record) -> None:
        fleet = subject.fleet(record.samples, time.time())
        before = record.decision
        decision, record.state = recommend(subject.policy, record.state, fleet, asyncio.get_running_loop().time())
        record.decision = decision
        self.metrics.set_load(key, decision.load)
        self._count(key, record, before, decision)
        if decision != before or (before is not None and (before.capacity is None) != (decision.capacity is None)):
            self.wake(key)

    def _count(self, key: Key, record: Record, before: Decision | None, decision: Decision) -> None:
        """Count and log a decision whose reason or replicas differ from those before."""
        reason = _reason(decision)
        changed = before is not None and before.replicas != decision.replicas
        if reason == record.shown and not changed:
            return
        record.shown = reason
        self.metrics.count_decision(key, reason)
        if changed and before is not None and decision.change is not None:
            words = (before.replicas, decision.replicas, decision.change.message)
            logger.info("%s/%s: from %d to %d replicas: %s", *key, *words)
        elif decision.hold is not None:
            logger.info("%s/%s: held at %d replicas: %s", *key, decision.replicas, decision.hold.message)


def _reason(decision: Decision) -> str:
    if decision.hold is not None:
        return decision.hold.reason
    return "Steady" if decision.change is None else decision.change.reason


def _targets(subject: Subject) -> tuple[Target, ...]:
    return tuple(
        Target(pod.name, metrics_url(pod.address), subject.model_name)
        for pod in subject.pods
        if pod.address and pod.ready_since is not None and not pod.terminating
    )
