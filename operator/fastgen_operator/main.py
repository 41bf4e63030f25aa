"""The program: kopf watches, and every event becomes a key in the controller's queue. No decision is made here."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import kopf
from kubernetes.config import ConfigException
from prometheus_client import start_http_server

from fastgen_operator.autoscale.loop import Autoscaler
from fastgen_operator.autoscale.scrape import Scraper
from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.children import Platform
from fastgen_operator.controller import Controller
from fastgen_operator.discovery import Discovery
from fastgen_operator.heartbeat import Stalled
from fastgen_operator.kinds import FASTGEN, OWNER_LABEL, POD, REPLICA_SET, Kind
from fastgen_operator.kube import Kube, connect
from fastgen_operator.logs import configure_logging
from fastgen_operator.metrics import Metrics
from fastgen_operator.mirror import Mirror, owner_of
from fastgen_operator.mirrored import MirroredCluster
from fastgen_operator.reconcile import Reconciler
from fastgen_operator.settings import Settings, parse_settings
from fastgen_operator.workqueue import WorkQueue


def kinds_read(platform: Platform) -> tuple[Kind, ...]:
    """What is read beside the FastGenDeployments: the children, and what the Deployment makes."""
    return (*platform.kinds, REPLICA_SET, POD)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the operator until SIGTERM. Exits with code 2 where the settings or the credentials are wrong."""
    settings = parse_settings(arguments)
    configure_logging(settings.log_format, verbose=settings.verbose)
    metrics = Metrics()
    try:
        kube = Kube(connect(), metrics)
    except ConfigException as error:
        words = str(error).rstrip(".")
        print(f"fastgen-operator: no cluster to work on: {words}: set KUBECONFIG or run it in a pod", file=sys.stderr)
        raise SystemExit(2) from None
    discovery, mirror = Discovery(kube, settings.platform), Mirror()
    # Optional kinds are listed and not watched: a watch of a kind that the cluster lacks fails for ever.
    kinds = kinds_read(settings.platform)
    cluster = MirroredCluster(kube, mirror, lambda: kinds_read(discovery.platform()), settings.scopes)
    watchlist = Watchlist(settings.scrape_seconds)
    reconciler = Reconciler(cluster, metrics, discovery.platform, watchlist, lambda: datetime.now(UTC))
    try:
        server, _ = start_http_server(settings.metrics_port, settings.bind_address, metrics.registry)
    except OSError as error:
        print(f"fastgen-operator: --metrics-port {settings.metrics_port}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        controller = Controller(settings, cluster, reconciler, discovery, metrics)
        autoscaler = Autoscaler(watchlist, Scraper(), metrics, controller.queue.add, settings.scrape_seconds)
        asyncio.run(_run(settings, controller, autoscaler, mirror, kinds))
    finally:
        server.shutdown()


async def _run(
    settings: Settings, controller: Controller, autoscaler: Autoscaler, mirror: Mirror, kinds: Sequence[Kind]
) -> None:
    # It sizes only fleets that a visit has seen: an operator that does not visit decides nothing.
    tasks = [*controller.start(), asyncio.create_task(autoscaler.run(), name="autoscaler")]
    try:
        await _wait_for_crd(controller)
        await kopf.operator(
            registry=build_registry(controller, mirror, kinds),
            settings=kopf_settings(kinds),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://{settings.bind_address}:{settings.health_port}/healthz",
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_crd(controller: Controller) -> None:
    """kopf looks once for what it is to watch: a CRD that came later would be missed for ever.

    Ends the process with code 0 on SIGTERM, which kopf does not handle yet.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (controller.listed, stopped)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stopped.is_set():
        raise SystemExit(0)


def build_registry(controller: Controller, mirror: Mirror, kinds: Sequence[Kind]) -> kopf.OperatorRegistry:
    """kopf's handlers: raw events only, which leave no finalizer, annotation or progress on any object."""
    registry = kopf.OperatorRegistry()
    queue: WorkQueue = controller.queue
    kopf.on.login(registry=registry)(kopf.login_via_client)

    async def remember(*, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        obj: Any = event["object"]
        if event["type"] == "DELETED":
            mirror.remove(param, obj)
        else:
            mirror.put(param, obj)
        if (owner := owner_of(param, obj)) is not None:
            queue.add(owner)

    for kind in (FASTGEN, *kinds):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, param=kind)(remember)

    @kopf.on.probe(id="heartbeat", registry=registry)
    async def check_heartbeat(**_: Any) -> dict[str, float]:
        try:
            return controller.heartbeat.check()
        except Stalled as error:
            # kopf answers 500, and says the message without a traceback.
            raise kopf.PermanentError(str(error)) from None

    return registry


def kopf_settings(kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    """kopf as a watcher only: our children by label, no Events, no scanning for which it would need more rights."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21, 30, 60)
    settings.networking.enforce_retry_after = True
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 300
    settings.queueing.error_delays = (1, 1, 2, 3, 5, 8, 13, 21, 30)
    settings.process.ultimate_exiting_timeout = 20
    for kind in kinds:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = OWNER_LABEL
    return settings


if __name__ == "__main__":
    main()
