"""The loops around `reconcile`: workers that empty the queue, and the resync that fills it without any event."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Protocol

from fastgen_operator.kinds import Key
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.metrics import Metrics
from fastgen_operator.reconcile.reconciler import Reconciler
from fastgen_operator.runtime.discovery import Discovery
from fastgen_operator.runtime.liveness import Heartbeat, Sign, Stalled
from fastgen_operator.runtime.settings import Settings
from fastgen_operator.runtime.workqueue import WorkQueue

logger = logging.getLogger(__name__)

# Missed resyncs after which the process is better started again.
_MISSES = 3


class Leads(Protocol):
    """Whether this operator may write."""

    def holds(self) -> bool:
        """At this moment."""
        ...

    async def wait(self) -> None:
        """Returns when it may."""
        ...


class Controller:
    """Visits every resource that is woken, and all of them from time to time, while this operator leads.

    One that stands by does all but the visits: its queue is full and its watches are open when it is its turn.

    Attributes:
        listed: set once everything has been listed: from then on the CRD is known to be there, and visits may begin.
        queue: the resources to visit.
        heartbeat: whether the work gets done.
    """

    def __init__(
        self,
        settings: Settings,
        cache: InformerCache,
        relister: Relister,
        reconciler: Reconciler,
        discovery: Discovery,
        metrics: Metrics,
        leadership: Leads,
        watches: Watches,
    ) -> None:
        self._settings = settings
        self._cache, self._relister = cache, relister
        self._reconciler = reconciler
        self._discovery = discovery
        self._metrics = metrics
        self._leadership = leadership
        self.queue = WorkQueue(
            first=settings.retry_seconds,
            limit=settings.retry_limit_seconds,
            jitter=random.random,
            clock=time.monotonic,
        )
        self.listed = asyncio.Event()
        self._watches = watches
        self._resynced_at = time.monotonic()
        self._led_since: float | None = None
        self._visits: dict[Key, float] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._busy: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._not_before = 0.0
        resyncs = max(_MISSES * settings.resync_seconds, settings.stall_seconds)
        self.heartbeat = Heartbeat(
            time.monotonic,
            (
                Sign("resyncSeconds", lambda: time.monotonic() - self._resynced_at, resyncs),
                Sign("queueSeconds", self._queue_age, resyncs),
                Sign("visitSeconds", self._visit_age, settings.stall_seconds),
                Sign("watchSeconds", self._watches.behind, resyncs),
            ),
            loop_limit=settings.stall_seconds,
        )

    def check_ready(self) -> dict[str, float]:
        """For the readiness probe: whether it could take over at once, or has. Raises Stalled."""
        if not self.listed.is_set():
            raise Stalled("the cluster could not be listed yet; see the log")
        return {"leads": float(self._leadership.holds())}

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the loops; they run until cancelled."""
        self._workers = [asyncio.create_task(self._work(), name=f"worker {n}") for n in range(self._settings.workers)]
        return [
            *self._workers,
            asyncio.create_task(self._resync(), name="resync"),
            asyncio.create_task(self._beat(), name="heartbeat"),
        ]

    async def finish(self, within: float) -> bool:
        """Begins no more visits; whether those under way came to their end within so many seconds."""
        self._is_closing = True
        busy = set(self._busy)
        for worker in self._workers:
            if worker not in busy:
                worker.cancel()
        if not busy:
            return True
        _, pending = await asyncio.wait(busy, timeout=within)
        for key in self._visits:
            logger.warning("%s/%s: the visit did not end within %g s", *key, within)
        return not pending

    async def _work(self) -> None:
        # A visit before the first list would take an empty memory for an empty cluster.
        await self.listed.wait()
        await self._leadership.wait()
        if self._led_since is None:
            self._led_since = time.monotonic()
        task = asyncio.current_task()
        assert task is not None
        while not self._is_closing:
            await self._until_allowed()
            key = await self.queue.take()
            self._busy.add(task)
            error = await self._visit(key)
            self._busy.discard(task)
            if error is None:
                self.queue.done(key)
            else:
                self.queue.retry(key, after=error.retry_after)

    async def _visit(self, key: Key) -> KubeError | None:
        """What stood in the way, which is tried again."""
        logger.debug("%s/%s: visit", *key)
        self._visits[key] = time.monotonic()
        try:
            with self._metrics.reconcile_seconds.time():
                problem = await asyncio.to_thread(self._reconciler.reconcile, key)
        except KubeError as error:
            self._metrics.errors.inc()
            logger.warning("%s/%s: reconciling: %s", *key, error)
            self._hold_back(error)
            return error
        except Exception as error:
            # Whatever it is, one resource may not stop the visits to all others.
            self._metrics.errors.inc()
            logger.exception("%s/%s: reconciling", *key)
            return KubeError(0, str(error))
        finally:
            del self._visits[key]
        return None if problem is None else KubeError(0, problem.message)

    async def _resync(self) -> None:
        interval, retry = self._settings.resync_seconds, self._settings.retry_seconds
        pause = retry
        next_list = time.monotonic()
        while True:
            try:
                await self._until_allowed()
                # Before any visit: what the platform offers decides what a visit writes.
                news = await asyncio.to_thread(self._discovery.refresh)
                if news or time.monotonic() >= next_list:
                    await self._relist()
                    next_list = time.monotonic() + self._settings.relist_seconds
                for key in self._cache.resources():
                    self.queue.add(key)
                self._resynced_at = time.monotonic()
                self.listed.set()
                pause = retry
                # Spread out, so that several things on one interval do not fall together for ever.
                await asyncio.sleep(interval * random.uniform(0.9, 1.1))
            except KubeError as error:
                # Missing resyncs make the liveness probe fail, which is the remedy if it does not get better.
                logger.warning("%s", error)
                self._hold_back(error)
                await asyncio.sleep(pause)
                pause = min(interval, 2 * pause)

    async def _relist(self) -> None:
        """Corrects the cache, and visits what it was wrong about: also what is gone, which no other list names."""
        for key in await asyncio.to_thread(self._relister.relist):
            self.queue.add(key)

    async def _beat(self) -> None:
        while True:
            self.heartbeat.beat()
            await asyncio.sleep(min(1.0, self._settings.stall_seconds / 4))

    def _hold_back(self, error: KubeError) -> None:
        """The API server asked to be left alone: that goes for every resource, not only for the one it told."""
        self._not_before = max(self._not_before, time.monotonic() + error.retry_after)

    async def _until_allowed(self) -> None:
        while (pause := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(pause)

    def _queue_age(self) -> float:
        """How long the longest waiting resource has waited for a worker; one that stands by has none."""
        if self._led_since is None:
            return 0.0
        return min(self.queue.oldest_wait(), time.monotonic() - self._led_since)

    def _visit_age(self) -> float:
        return time.monotonic() - min(self._visits.values()) if self._visits else 0.0
