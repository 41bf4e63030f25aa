"""The loops around `reconcile`: workers that empty the queue, and the resync that fills it without any event."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from fastgen_operator.discovery import Discovery
from fastgen_operator.heartbeat import Heartbeat
from fastgen_operator.kinds import Key
from fastgen_operator.kube import KubeError
from fastgen_operator.metrics import Metrics
from fastgen_operator.mirrored import MirroredCluster
from fastgen_operator.reconcile import Reconciler
from fastgen_operator.settings import Settings
from fastgen_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)


class Controller:
    """Visits every resource that is woken, and all of them from time to time.

    Attributes:
        listed: set once everything has been listed: from then on the CRD is known to be there, and visits begin.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: MirroredCluster,
        reconciler: Reconciler,
        discovery: Discovery,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._reconciler = reconciler
        self._discovery = discovery
        self._metrics = metrics
        self.queue = WorkQueue(
            first=settings.retry_seconds,
            limit=settings.retry_limit_seconds,
            jitter=random.random,
            clock=time.monotonic,
        )
        self.listed = asyncio.Event()
        self.heartbeat = Heartbeat(time.monotonic, settings.resync_seconds, self.queue.oldest_wait)

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the loops; they run until cancelled."""
        workers = [asyncio.create_task(self._work(), name=f"worker {n}") for n in range(self._settings.workers)]
        return [*workers, asyncio.create_task(self._resync(), name="resync")]

    async def _work(self) -> None:
        # A visit before the first list would take an empty memory for an empty cluster.
        await self.listed.wait()
        while True:
            key = await self.queue.take()
            if await self._visit(key):
                self.queue.done(key)
            else:
                self.queue.retry(key)

    async def _visit(self, key: Key) -> bool:
        """Whether the visit came to its end; what stood in the way is tried again."""
        logger.debug("%s/%s: visit", *key)
        try:
            with self._metrics.reconcile_seconds.time():
                problem = await asyncio.to_thread(self._reconciler.reconcile, key)
        except KubeError as error:
            self._metrics.errors.inc()
            logger.warning("%s/%s: reconciling: %s", *key, error)
            return False
        except Exception:
            # Whatever it is, one resource may not stop the visits to all others.
            self._metrics.errors.inc()
            logger.exception("%s/%s: reconciling", *key)
            return False
        return problem is None

    async def _resync(self) -> None:
        interval, retry = self._settings.resync_seconds, self._settings.retry_seconds
        pause = retry
        next_list = time.monotonic()
        while True:
            try:
                # Before any visit: what the platform offers decides what a visit writes.
                news = await asyncio.to_thread(self._discovery.refresh)
                if news or time.monotonic() >= next_list:
                    await self._relist()
                    next_list = time.monotonic() + self._settings.relist_seconds
                for key in self._cluster.resources():
                    self.queue.add(key)
                self.heartbeat.beat()
                self.listed.set()
                pause = retry
                # Spread out, so that several things on one interval do not fall together for ever.
                await asyncio.sleep(interval * random.uniform(0.9, 1.1))
            except KubeError as error:
                # Missing beats make the liveness probe fail, which is the remedy if it does not get better.
                logger.warning("%s", error)
                await asyncio.sleep(pause)
                pause = min(interval, 2 * pause)

    async def _relist(self) -> None:
        """Corrects the mirror, and visits what it was wrong about: also what is gone, which no other list names."""
        wrong = await asyncio.to_thread(self._cluster.relist)
        if self.listed.is_set() and wrong:
            logger.info("the watches had missed something about %d resources", len(wrong))
        for key in wrong:
            self.queue.add(key)
