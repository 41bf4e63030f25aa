"""kopf as a watcher only: every event goes into the cache, and its owner's key into the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import kopf

from fastgen_operator.children import Platform
from fastgen_operator.kinds import FASTGEN, OWNER_LABEL, POD, REPLICA_SET, Kind
from fastgen_operator.kube.cache import InformerCache, owner_of
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.runtime.kopf_storage import NoDiffs, NoProgress
from fastgen_operator.runtime.settings import Settings
from fastgen_operator.runtime.workqueue import WorkQueue


class _Backoffs:
    """Seconds between tries of a request of kopf's, without end: after the last of a list it would end the operator.

    Whether that is the remedy is for the liveness probe to say, which also knows of what still works.
    """

    def __iter__(self) -> Iterator[float]:
        return chain((1, 1, 2, 3, 5), repeat(10))


def kinds_read(platform: Platform) -> tuple[Kind, ...]:
    """What is read beside the FastGenDeployments: the children, and what the Deployment makes."""
    return (*platform.kinds, REPLICA_SET, POD)


def build_registry(
    queue: WorkQueue, cache: InformerCache, watches: Watches, kinds: Sequence[Kind]
) -> kopf.OperatorRegistry:
    """kopf's handlers: raw events only, which leave no finalizer, annotation or progress on any object."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(kopf.login_via_client)

    async def remember(*, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        obj: Any = event["object"]
        watches.delivered(param, obj, event["type"])
        if event["type"] == "DELETED":
            cache.remove(param, obj)
        else:
            cache.put(param, obj)
        if (owner := owner_of(param, obj)) is not None:
            queue.add(owner)

    for kind in (FASTGEN, *kinds):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, param=kind)(remember)
    return registry


def kopf_settings(own: Settings, kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    """Our children by label, no Events, no scanning for which it would need more rights."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoDiffs()
    settings.persistence.progress_storage = NoProgress()
    settings.networking.request_timeout = own.request_seconds
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.enforce_retry_after = True
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = own.silence_seconds
    # A task for each object lives this long after its last event: a list of thousands would be thousands of them.
    settings.queueing.idle_timeout = 0.1
    settings.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 30)
    settings.process.ultimate_exiting_timeout = 20
    for kind in kinds:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNER_LABEL
    return settings
