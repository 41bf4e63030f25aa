"""The loops around `reconcile`: workers process the queue, and a periodic resync fills it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastgen_operator.kinds import FASTGEN, INFERENCE_POOL, Key, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.sources import Sources
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.metrics import Metrics
from fastgen_operator.reconcile.reconciler import Reconciler
from fastgen_operator.runtime.discovery import Discovery
from fastgen_operator.runtime.leader_election import Leadership, SoleLeadership
from fastgen_operator.runtime.liveness import Heartbeat, Progress, Sign, Stalled
from fastgen_operator.runtime.settings import Settings
from fastgen_operator.runtime.workqueue import WorkQueue
from fastgen_operator.status.conditions.progressing import is_refused

logger = logging.getLogger(__name__)

# Resync intervals without a step of the resync after which the liveness probe fails.
_ROUNDS = 3
# Between two looks at the pods of the gateway. One that is deleted serves for 15 s at least.
_PICKER_SECONDS = 2.0


@dataclass(slots=True)
class Controller:
    """Reconciles queued resources, and all resources periodically, while this operator leads.

    A standby lists and watches, too: its queue is filled and its watches are open when it takes over.

    Attributes:
        progress: steps of the threads that reconcile and list.
        clock: monotonic seconds.
        record_stale: records which kinds cannot be read; called in a thread, after the lists of a resync.
        listed: set when a namespace, or the cluster, is listed for the first time: reconciles may start. Resources of
            namespaces that cannot be listed wait (`kube/sources.py`).
        queue: the resources to reconcile.
        heartbeat: progress of the loops, for the liveness probe.
    """

    settings: Settings
    cache: InformerCache
    relister: Relister
    reconciler: Reconciler
    discovery: Discovery
    metrics: Metrics
    leadership: Leadership | SoleLeadership
    watches: Watches
    sources: Sources
    progress: Progress
    clock: Callable[[], float] = time.monotonic
    record_stale: Callable[[], object] = lambda: None
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    queue: WorkQueue = field(init=False)
    heartbeat: Heartbeat = field(init=False)
    _resync_step_at: float = field(init=False)
    _led_since: float | None = None
    _running: set[Key] = field(default_factory=set)
    _workers: list[asyncio.Task[None]] = field(default_factory=list)
    _busy: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closing: bool = False
    _not_before: float = 0.0

    def __post_init__(self) -> None:
        settings, progress, clock = self.settings, self.progress, self.clock
        self._resync_step_at = clock()
        first, limit = settings.retry_seconds, settings.retry_limit_seconds
        self.queue = WorkQueue(
            first=first,
            limit=limit,
            jitter=random.random,
            clock=clock,
            yields=self._is_refused,
            is_new=self._is_new,
            workers=settings.workers,
        )
        resyncs = max(_ROUNDS * settings.resync_seconds, settings.stall_seconds)
        self.heartbeat = Heartbeat(
            clock,
            (
                Sign("resyncSeconds", self._resync_age, resyncs),
                Sign("queueSeconds", self._queue_age, settings.stall_seconds),
                Sign("reconcileSeconds", lambda: progress.stuck("reconcile"), settings.stall_seconds),
                Sign("watchSeconds", self.watches.behind, resyncs),
            ),
            loop_limit=settings.stall_seconds,
        )
        # Settled resources count as reconciled without a worker, so the number of reconciles does not show that workers
        # hang. The ages of resyncs and watches grow between two events, and say nothing in an alert.
        self.metrics.stalled_seconds.set_function(lambda: self.heartbeat.stalled(("queueSeconds", "reconcileSeconds")))

    def check_ready(self) -> dict[str, float]:
        """Return the readiness probe's values; raise Stalled until `listed` is set."""
        if not self.listed.is_set():
            raise Stalled(f"the cluster could not be listed yet: {self.sources.first_failure() or 'see the log'}")
        return {"leads": float(self.leadership.holds())}

    def add_listed(self, key: Key) -> None:
        """Queue a resource for which a list has corrected the cache: as a changed one if its spec was edited."""
        resource = self.cache.get(FASTGEN, *key)
        (self.queue.add if resource is not None and _is_edited(resource) else self.queue.add_listed)(key)

    def start(self) -> list[asyncio.Task[None]]:
        """Start the loops; they run until cancelled."""
        self._workers = [asyncio.create_task(self._work(), name=f"worker {n}") for n in range(self.settings.workers)]
        return [
            *self._workers,
            asyncio.create_task(self._resync(), name="resync"),
            asyncio.create_task(self._beat(), name="heartbeat"),
            *([] if self.settings.gateway_namespace is None else [asyncio.create_task(self._follow_pickers())]),
        ]

    async def finish(self, within: float) -> bool:
        """Start no more reconciles; return whether the running ones ended within that many seconds."""
        self._is_closing = True
        busy = set(self._busy)
        for worker in self._workers:
            if worker not in busy:
                worker.cancel()
        if not busy:
            return True
        _, pending = await asyncio.wait(busy, timeout=within)
        for key in self._running:
            logger.warning("%s/%s: the reconcile did not end within %g s", *key, within)
        return not pending

    async def _work(self) -> None:
        # Before the first list, an empty cache does not mean an empty cluster.
        await self.listed.wait()
        await self.leadership.wait()
        if self._led_since is None:
            self._led_since = self.clock()
        task = asyncio.current_task()
        assert task is not None
        while not self._is_closing:
            await self._wait_for_backoff()
            key = await self.queue.take()
            if not self.sources.serves(key[0]):
                # The resync queues it again when the namespace is listed.
                self.queue.done(key)
                continue
            self._busy.add(task)
            retry_after = await self._reconcile(key)
            self._busy.discard(task)
            self.queue.add_after(key, self.reconciler.seconds_until_due(key))
            if retry_after is None:
                self.queue.done(key)
            else:
                self.queue.retry(key, after=retry_after)

    async def _reconcile(self, key: Key) -> float | None:
        """Reconcile a resource; return the minimum seconds until a retry, or None if it needs none."""
        logger.debug("%s/%s: reconcile", *key)
        self._running.add(key)
        try:
            problem = await asyncio.to_thread(self.progress.run, "reconcile", self.reconciler.reconcile, key)
        except KubeError as error:
            self.metrics.errors.inc()
            logger.warning("%s/%s: reconciling: %s", *key, error)
            self._back_off(error)
            return error.retry_after
        except Exception:
            # A failure of one resource must not stop the worker.
            self.metrics.errors.inc()
            logger.exception("%s/%s: reconciling", *key)
            return 0.0
        finally:
            self._running.discard(key)
        return None if problem is None else 0.0

    async def _resync(self) -> None:
        interval, retry = self.settings.resync_seconds, self.settings.retry_seconds
        pause = retry
        while True:
            try:
                await self._wait_for_backoff()
                self._resync_step_at = self.clock()
                # Before any reconcile: the platform decides which children are written.
                await asyncio.to_thread(self.progress.run, "list", self.discovery.refresh)
                await asyncio.to_thread(self.progress.run, "list", self.discovery.refresh_pickers)
                # Corrects the cache; resources for which it was wrong are reconciled, deleted ones included.
                wrong = await asyncio.to_thread(self.progress.run, "list", self.relister.relist)
                await asyncio.to_thread(self.progress.run, "list", self.record_stale)
                # After a start these are all: those that have been handled before do not wait for new ones.
                for key in sorted(wrong, key=self._is_new):
                    self.add_listed(key)
                # In one thread for all: handing each to a worker takes longer than to see that nothing has changed.
                unsettled = self.reconciler.unsettled
                served = [key for key in self.cache.resources() if self.sources.serves(key[0])]
                for key in await asyncio.to_thread(self.progress.run, "list", unsettled, served):
                    self.queue.add_idle(key)
                if not self.listed.is_set() and not self.sources.serves_any():
                    await asyncio.sleep(pause)
                    pause = min(interval, 2 * pause)
                    continue
                self.listed.set()
                pause = retry
                # Jitter keeps loops with the same interval from staying in phase.
                await asyncio.sleep(interval * random.uniform(0.9, 1.1))
            except KubeError as error:
                logger.warning("%s", error)
                self._back_off(error)
                await asyncio.sleep(max(pause, error.retry_after))
                pause = min(interval, 2 * pause)
            except Exception:
                # A defect at one object must not end the resync of all.
                logger.exception("resync")
                await asyncio.sleep(interval)

    async def _follow_pickers(self) -> None:
        """Keep the addresses in the EndpointSlices of pickers those of the gateway's pods."""
        while True:
            try:
                if await asyncio.to_thread(self.discovery.refresh_pickers):
                    for key in self.cache.resources():
                        if self.cache.owned(INFERENCE_POOL, key):
                            self.queue.add_listed(key)
            except Exception:
                # The pods in the slices stay, and other resources are reconciled.
                logger.exception("looking for the pods of the gateway")
            await asyncio.sleep(_PICKER_SECONDS)

    async def _beat(self) -> None:
        while True:
            self.heartbeat.beat()
            await asyncio.sleep(min(1.0, self.settings.stall_seconds / 4))

    def _is_new(self, key: Key) -> bool:
        resource = self.cache.get(FASTGEN, *key)
        # The CRD has a default of the status.
        return resource is not None and not resource.get("status", {}).get("conditions")

    def _is_refused(self, key: Key) -> bool:
        resource = self.cache.get(FASTGEN, *key)
        return resource is not None and is_refused(resource)

    def _back_off(self, error: KubeError) -> None:
        """Delay all reconciles while the API server is overloaded, not only the one that failed."""
        if error.is_overload:
            self._not_before = max(self._not_before, self.clock() + error.retry_after)

    async def _wait_for_backoff(self) -> None:
        while (pause := self._not_before - self.clock()) > 0:
            await asyncio.sleep(pause)

    def _resync_age(self) -> float:
        """Return the time since the last step of the resync, seconds. A failed list is a step: it is retried."""
        return self.clock() - max(self._resync_step_at, self.progress.last("list"))

    def _queue_age(self) -> float:
        """Return the seconds in which resources waited and no worker made a step.

        0 on a standby, or if no resource waits. While workers make steps, a long wait is not a stall.
        """
        if self._led_since is None or not (wait := self.queue.oldest_wait()):
            return 0.0
        since = max(self._led_since, self._not_before, self.progress.last("reconcile"))
        return max(0.0, min(wait, self.clock() - since))


def _is_edited(resource: Object) -> bool:
    """Return whether the spec has changed since the last status, for example while the operator was down."""
    # 0 is the CRD's default.
    observed = resource.get("status", {}).get("observedGeneration")
    return bool(observed) and observed != resource["metadata"].get("generation")
