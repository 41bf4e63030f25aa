"""Informers: kopf watches; each event updates the cache and queues the owner's key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final, cast

import aiohttp
import kopf

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import FASTGEN, POD, REPLICA_SET, Kind, Object
from fastgen_operator.kube.cache import InformerCache, owner_of
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.runtime.kopf_session import Feed, KopfSession
from fastgen_operator.runtime.settings import Settings
from fastgen_operator.runtime.workqueue import WorkQueue

logger = logging.getLogger(__name__)

# Seconds between two logins, and before kopf is started again.
_LOGIN_SECONDS, _RESTART_SECONDS = 5.0, 5.0
# kopf reports each attempt of a request; `Sources` reports what fails, once.
_LOUD: Final = "kopf._cogs.clients.watching"


class _Backoffs:
    """Endless sequence of the pauses between kopf's retries, in seconds: at its end, kopf would stop the operator.

    The liveness probe decides about restarts instead.
    """

    def __iter__(self) -> Iterator[float]:
        return chain((1, 1, 2, 3, 5), repeat(10))


class _NoDiffs(kopf.MultiDiffBaseStorage):
    """Skips the copies that kopf makes of each object for change handlers: the operator takes raw events."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return an empty essence."""
        return cast(kopf.BodyEssence, {})


def kinds_read(platform: Platform) -> tuple[Kind, ...]:
    """Return the kinds to read besides FastGenDeployments: children, ReplicaSets and pods."""
    return (*platform.kinds, REPLICA_SET, POD)


class _Login:
    """kopf's login with the credentials of the official client, and a `KopfSession`."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._next = 0.0

    async def __call__(self, **given: Any) -> kopf.AiohttpSession | None:
        loop = asyncio.get_running_loop()
        # kopf logs in again when the API server rejects the credentials.
        await asyncio.sleep(max(0.0, self._next - loop.time()))
        self._next = loop.time() + _LOGIN_SECONDS
        info = kopf.login_via_client(**given)
        if info is None:
            return None
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
        )
        own: Any = KopfSession(session, info.server, self._feed)
        return kopf.AiohttpSession(aiohttp_session=own, server=info.server, default_namespace=info.default_namespace)


def build_registry(
    queue: WorkQueue, cache: InformerCache, watches: Watches, kinds: Sequence[Kind], feed: Feed
) -> kopf.OperatorRegistry:
    """Build kopf's handlers of raw events, which leave no finalizer, annotation or progress on objects."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_Login(feed).__call__)

    async def handle(*, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        obj: Any = event["object"]
        watches.delivered(param, obj, event["type"])
        deliver(param, event["type"], obj, cache, queue)

    for kind in (FASTGEN, *kinds):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, param=kind)(handle)
    return registry


def deliver(kind: Kind, event: str | None, obj: Object, cache: InformerCache, queue: WorkQueue) -> None:
    """Update the cache with an event of a watch, then queue the owner: its reconcile has to find the change."""
    if event == "DELETED":
        cache.remove(kind, obj)
    else:
        cache.put(kind, obj)
    if (owner := owner_of(kind, obj)) is not None:
        queue.add(owner)


def kopf_settings(own: Settings, kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    """Build kopf's settings: children selected by label, no Events, and no scanning, which needs more permissions."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffs([])
    settings.persistence.progress_storage = kopf.MultiProgressStorage([])
    settings.networking.request_timeout = own.request_seconds
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.enforce_retry_after = True
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = own.silence_seconds
    # kopf keeps a task per object this long after its last event: a long list would mean thousands of tasks.
    settings.queueing.idle_timeout = 0.1
    settings.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 30)
    # kopf would kill the process, with the Lease held.
    settings.process.ultimate_exiting_timeout = None
    for kind in kinds:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNER_LABEL
    return settings


async def watch(own: Settings, queue: WorkQueue, cache: InformerCache, feed: Feed) -> None:
    """Run kopf, which feeds the cache and the queue, until cancelled.

    If kopf ends, it is started again: everything else goes on meanwhile, with the lists of the resync.
    """
    kinds = kinds_read(own.platform)
    logging.getLogger(_LOUD).setLevel(logging.CRITICAL)
    while True:
        try:
            await kopf.operator(
                registry=build_registry(queue, cache, feed.watches, kinds, feed),
                settings=kopf_settings(own, kinds),
                standalone=True,
                clusterwide=not own.namespaces,
                namespaces=own.namespaces,
            )
            logger.error("the watches have ended; they are opened again")
        except Exception:
            logger.exception("the watches have ended; they are opened again")
        await asyncio.sleep(_RESTART_SECONDS)
