"""The autoscaler's loop: scrape fleets, decide, ask engines what they do, queue resources with an outdated status."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from time import thread_time
from typing import Final

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.rehearsal.learning import Learning, Rehearsal, learn
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.gateways import POLL_SECONDS, Answer, Gateways
from fastgen_operator.autoscale.scrape.outcomes import OUTCOMES_QUERY, parse_outcomes
from fastgen_operator.autoscale.scrape.scraper import Scraped, Scraper, Target
from fastgen_operator.autoscale.supply import LoadingStage
from fastgen_operator.autoscale.watchlist import Record, Subject, TrialPods, Watchlist
from fastgen_operator.canary.outcomes import Outcomes
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.pod import Pod

logger = logging.getLogger(__name__)

# Fleets without autoscaling are scraped once in this many intervals, because only their status depends on it. The
# default is one minute, less than the 75 s after which an engine closes a connection.
FIXED_PERIODS: Final = 12
# The stage of a loading engine is read once in this many intervals: each change is a write of the status.
STAGE_PERIODS: Final = 2
# Minimum seconds between two rehearsals of a fleet. All rehearsals together use at most this share of a core: with many
# fleets, the time between two of one fleet is longer.
REHEARSAL_SECONDS: Final = 600.0
REHEARSAL_SHARE: Final = 0.02


@dataclass(slots=True)
class Autoscaler:
    """Measures all fleets, and sizes those with autoscaling.

    Each fleet is measured by a task of its own, so that none waits for the replicas of another.

    Attributes:
        wake: queues a reconcile.
        now: returns the time, with a time zone, as in the objects of the cluster.
        gateways: the gateway's pods, which are asked while a fleet may have no replica; None without a gateway.
    """

    watchlist: Watchlist
    scraper: Scraper
    metrics: Metrics
    wake: Callable[[Key], None]
    now: Callable[[], datetime]
    gateways: Gateways | None = None
    _running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    _reading: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    _comparing: dict[Key, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Scrape and decide periodically until cancelled."""
        period = self.watchlist.scrape_seconds
        async with self.scraper:
            try:
                await asyncio.gather(
                    _repeat(period, lambda: self._begin(lambda subject: subject.is_autoscaled)),
                    _repeat(FIXED_PERIODS * period, lambda: self._begin(lambda subject: not subject.is_autoscaled)),
                    _repeat(STAGE_PERIODS * period, self._begin_reading),
                    _repeat(period, self.begin_comparing),
                    _repeat(POLL_SECONDS, self._ask_gateways),
                    self._rehearse(),
                )
            finally:
                for task in (*self._running.values(), *self._reading.values(), *self._comparing.values()):
                    task.cancel()
                if self.gateways is not None:
                    self.gateways.close()

    async def run_once(self, chosen: Callable[[Subject], bool] = lambda _: True) -> None:
        """Scrape all chosen fleets once, and decide on those with autoscaling. Skip those being scraped."""
        await asyncio.gather(*self._begin(chosen))

    def _begin(
        self, chosen: Callable[[Subject], bool], among: Collection[Key] | None = None
    ) -> list[asyncio.Task[None]]:
        """Begin to measure the chosen fleets, except those whose last measurement is not complete.

        Args:
            among: the keys to choose from; None for all.
        """
        begun = []
        for key, subject in self.watchlist.subjects():
            if (among is None or key in among) and chosen(subject) and key not in self._running:
                self._running[key] = asyncio.create_task(self._measure(key, subject))
                begun.append(self._running[key])
        return begun

    def _ask_gateways(self) -> None:
        """Begin to ask the gateway's pods, if a fleet may have no replica."""
        if self.gateways is None:
            return
        if any(subject.scales_to_zero for _, subject in self.watchlist.subjects()):
            self.gateways.begin(self._wake_fleets)
        else:
            self.gateways.rest()

    def _wake_fleets(self, answer: Answer) -> None:
        """Decide at once on the fleets without a replica for which a pod of the gateway holds requests."""
        held = {key for key, waiting in answer.deployments.items() if waiting.held}
        if held:
            self._begin(lambda subject: subject.scales_to_zero and not subject.replicas, held)

    def _begin_reading(self) -> list[asyncio.Task[None]]:
        """Begin to ask one engine of each fleet what it serves, or what it does while it loads.

        Fleets whose last read is running, and those of which both is known, are left out.
        """
        begun = []
        for key, subject in self.watchlist.subjects():
            if key in self._reading:
                continue
            known = self.watchlist.served_model(key, subject.uid)
            if (pod := subject.described) is not None and (known is None or known.revision != pod.revision):
                read = self._read_model(key, subject, pod)
            elif (pod := subject.loading) is not None and pod.address:
                read = self._read_stage(key, pod, pod.address)
            else:
                continue
            self._reading[key] = asyncio.create_task(read)
            begun.append(self._reading[key])
        return begun

    async def _read_model(self, key: Key, subject: Subject, pod: Pod) -> None:
        """Read what a ready engine serves, and request a new status; without an answer, it is asked again."""
        try:
            if pod.address and (model := await self.scraper.read_model(pod.address, pod.revision)) is not None:
                self.watchlist.set_served_model(key, subject, model)
                self.wake(key)
        finally:
            del self._reading[key]

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

    def begin_comparing(self) -> list[asyncio.Task[None]]:
        """Begin to measure the canaries on trial, except those whose last measurement is not complete."""
        begun = []
        for key, subject in self.watchlist.subjects():
            if subject.trial is not None and key not in self._comparing:
                self._comparing[key] = asyncio.create_task(self._compare(key, subject, subject.trial))
                begun.append(self._comparing[key])
        return begun

    async def _compare(self, key: Key, subject: Subject, trial: TrialPods) -> None:
        """Measure both revisions, and request a reconcile: its decision also depends on the time."""
        try:
            if trial.pods:
                targets = _targets(subject.model_name, (*subject.pods, *trial.pods))
                name = f"{'/'.join(key)} canary"
                answers = await self.scraper.scrape_as(name, targets, OUTCOMES_QUERY, parse_outcomes)
                usable = {target.pod: each for target, each in answers.items() if isinstance(each, Outcomes)}
                self.watchlist.add_evidence(key, subject, usable)
            self.wake(key)
        except Exception:
            # A failure must not stop the trial of other revisions.
            logger.exception("%s/%s: comparing a new revision with the present one", *key)
        finally:
            del self._comparing[key]

    async def _rehearse(self) -> None:
        """Rehearse the recorded arrivals of the fleets, one after another, until cancelled."""
        while True:
            for key, _ in self.watchlist.subjects():
                await asyncio.sleep(await self.rehearse_once(key) / REHEARSAL_SHARE)
            await asyncio.sleep(self.watchlist.scrape_seconds)

    async def rehearse_once(self, key: Key) -> float:
        """Rehearse a fleet's arrivals in a thread, if that is due; return the CPU seconds that it took.

        A round takes long: the fleet may have changed, or be gone, since the round began.
        """
        subject = self.watchlist.subject(key)
        if subject is None:
            return 0.0
        record, now = self.watchlist.lookup(key, subject.uid), asyncio.get_running_loop().time()
        if record is None:
            return 0.0
        if math.isinf(record.rehearsed) and record.learning.floor:
            # An earlier leader may just have changed the bound.
            record.rehearsed = now
        if now - record.rehearsed < REHEARSAL_SECONDS:
            return 0.0
        seconds = 0.0

        def timed(rehearsal: Rehearsal) -> Learning:
            nonlocal seconds
            began = thread_time()
            try:
                return learn(rehearsal)
            finally:
                seconds = thread_time() - began

        try:
            if (rehearsal := record.rehearsal(subject)) is None:
                return 0.0
            record.rehearsed = now
            learning = await asyncio.to_thread(timed, rehearsal)
        except Exception:
            # A failure must not stop learning about other fleets.
            logger.exception("%s/%s: rehearsing its arrivals", *key)
            record.rehearsed = now
            return seconds
        if record is not self.watchlist.lookup(key, subject.uid):
            return seconds
        if learning.floor != record.learning.floor:
            logger.info("%s/%s: spec.autoscaling.learning %s: %s", *key, subject.policy.learning, learning.message)
        if record.set_learning(rehearsal, learning, self.now().timestamp()):
            self.wake(key)
        return seconds

    async def _measure(self, key: Key, subject: Subject) -> None:
        """Scrape a fleet, and decide on it if it has autoscaling."""
        try:
            answers = await self.scraper.scrape("/".join(key), _targets(subject.model_name, subject.pods))
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
        before, now = record.decision, asyncio.get_running_loop().time()
        asked = self.gateways if subject.scales_to_zero else None
        traffic = None if asked is None else asked.traffic(key, now)
        self.metrics.set_held(key, None if traffic is None else traffic.held)
        changed = record.update(subject, samples, now, self.now().timestamp(), traffic)
        decision = record.decision
        self.metrics.set_stragglers(key, {each.pod: each.share for each in record.speeds.stragglers})
        self.metrics.set_load(key, None if decision is None else decision.load)
        self.metrics.set_recommended(key, None if decision is None else decision.replicas)
        is_rehearsed = subject.learns and record.journal.rehearsal is not None
        learned = max(record.learned(self.now().timestamp()), subject.policy.min_replicas)
        self.metrics.set_learned(key, learned if is_rehearsed else None)
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


def _targets(model_name: str, pods: Iterable[Pod]) -> tuple[Target, ...]:
    return tuple(
        Target(pod.name, address, model_name)
        for pod in pods
        if (address := pod.address) and pod.ready_since is not None and not pod.is_terminating
    )
