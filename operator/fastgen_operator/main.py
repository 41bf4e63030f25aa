"""Entry point: assembles the operator, and stops its parts in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from kubernetes.client import ApiClient
from kubernetes.config import ConfigException

from fastgen_operator.autoscale.loop import Autoscaler
from fastgen_operator.autoscale.scrape.gateways import Gateways
from fastgen_operator.autoscale.scrape.scraper import Scraper
from fastgen_operator.autoscale.watchlist import Watchlist
from fastgen_operator.kinds import FASTGEN
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.clock import ClusterClock, boot_seconds
from fastgen_operator.kube.lease import Lease
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.sources import Sources
from fastgen_operator.kube.transport import ApiServer, connect
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.metrics import Metrics
from fastgen_operator.reconcile.events import Recorder
from fastgen_operator.reconcile.reconciler import Reconciler
from fastgen_operator.runtime.controller import Controller
from fastgen_operator.runtime.discovery import Discovery, gateway_pods
from fastgen_operator.runtime.http_servers import decision_server, health_server, metrics_server
from fastgen_operator.runtime.informers import kinds_read, watch
from fastgen_operator.runtime.kopf_session import THREADS, Feed
from fastgen_operator.runtime.leader_election import Leadership, LeadershipLost, SoleLeadership
from fastgen_operator.runtime.liveness import Progress
from fastgen_operator.runtime.process import (
    collect_garbage_less_often,
    configure_logging,
    end_generators_silently,
    hold_stop_signals,
    raise_open_files_limit,
    stop_on_signals,
)
from fastgen_operator.runtime.settings import Settings, parse_settings
from fastgen_operator.runtime.stale_events import StaleEvents
from fastgen_operator.scale_down.loads import read_loads

# Where the kubelet writes the pod's namespace.
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# How long the watches may take to end, after the Lease was released.
_END_SECONDS = 5.0

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Exits with code 2 if the settings or credentials are invalid or a port cannot be used; with 1 if it loses the Lease,
    fails, or a running reconcile does not end in time after the signal.
    """
    settings = parse_settings(arguments)
    configure_logging(settings.log_format, verbose=settings.verbose)
    collect_garbage_less_often()
    metrics = Metrics()
    try:
        # One connection for each worker and list, the resync, the two lists of the gateway's pods and the Lease.
        api_client = connect(settings.workers + THREADS + 4)
    except ConfigException as error:
        reason = str(error).rstrip(".")
        _exit_usage(f"no credentials for a cluster: {reason}: set KUBECONFIG, or run the operator in a pod")
    clock = ClusterClock()
    leadership = _leadership(settings, api_client, metrics, clock)
    cache = InformerCache(lambda resource: resource["spec"].get("operatorClass") == settings.operator_class)
    progress = Progress(time.monotonic)
    server = ApiServer(api_client, metrics, settings.request_seconds, progress.step, clock)
    client = KubeClient(server, cache, metrics, leadership.holds)
    sources = Sources(settings.scopes, metrics.show_source)
    discovery = Discovery(client, settings.platform, sources, settings.gateway_namespace)
    # Optional kinds are listed, not watched: their CRDs may be missing.
    watched = (FASTGEN, *kinds_read(settings.platform))
    watches = Watches(time.monotonic, watched, settings.scopes, settings.relist_seconds)
    relister = Relister(
        client,
        cache,
        watches,
        sources,
        lambda: (*watched[1:], *discovery.listed_kinds()),
        settings.scopes,
        settings.relist_seconds,
    )
    watchlist = Watchlist(settings.scrape_seconds)
    reconciler = Reconciler(
        cache,
        client,
        metrics,
        discovery.platform,
        watchlist,
        clock.now,
        read_loads,
        settings.operator_class,
        sources.is_stale,
    )
    stale_events = StaleEvents(sources, Recorder(client), leadership.lease, clock.now)
    controller = Controller(
        *(settings, cache, relister, reconciler, discovery, metrics, leadership, watches, sources, progress),
        record_stale=stale_events.record,
    )
    feed = Feed(watched, settings.scopes, relister, sources, watches, controller.add_listed)
    # The other half is for new connections, the API server and the probes.
    scraper = Scraper(settings.scrape_seconds, keep=raise_open_files_limit() // 2)
    gateways = None
    if settings.gateway_namespace is not None:
        gateways = Gateways(
            partial(gateway_pods, client, settings.gateway_namespace),
            scraper,
            lambda reason: metrics.gateway_failures.labels(reason).inc(),
        )
    autoscaler = Autoscaler(watchlist, scraper, metrics, controller.queue.add, clock.now, gateways)
    checks = {"/healthz": controller.heartbeat.check, "/readyz": controller.check_ready}
    address = settings.bind_address
    hold_stop_signals()
    with ExitStack() as servers:
        with _port("--metrics-port", settings.metrics_port) as port:
            servers.enter_context(metrics_server(address, port, metrics.registry))
        with _port("--health-port", settings.health_port) as port:
            servers.enter_context(health_server(address, port, checks))
        with _port("--decisions-port", settings.decisions_port) as port:
            servers.enter_context(decision_server(port, watchlist.journal))
        asyncio.run(_run(settings, controller, autoscaler, leadership, cache, feed))


@contextmanager
def _port(flag: str, port: int) -> Iterator[int]:
    """Exit with a message if the port of the flag cannot be listened on."""
    try:
        yield port
    except OSError as error:
        remedy = f"set {flag} to a free port above 1023"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            remedy = "set --bind-address to an address of this machine"
        _exit_usage(f"{flag} {port}: {error.strerror}: {remedy}")


def _exit_usage(message: str) -> NoReturn:
    print(f"fastgen-operator: {message}", file=sys.stderr)
    raise SystemExit(2)


def _leadership(
    settings: Settings, client: ApiClient, metrics: Metrics, clock: ClusterClock
) -> Leadership | SoleLeadership:
    if not settings.leader_elect:
        metrics.leader.set(1)
        return SoleLeadership()
    namespace = settings.lease_namespace
    if namespace is None and NAMESPACE_FILE.exists():
        namespace = NAMESPACE_FILE.read_text().strip()
    if not namespace:
        _exit_usage("outside a pod, set --lease-namespace, or --no-leader-elect if no other operator runs")
    # Two attempts fit into the renewal deadline.
    server = ApiServer(client, metrics, settings.terms.renew / 2, clock=clock)
    identity = f"{socket.gethostname()}_{uuid4().hex[:8]}"
    lease = Lease(server, namespace, settings.lease)
    return Leadership(lease, identity, settings.terms, boot_seconds, metrics.leader.set)


async def _run(
    settings: Settings,
    controller: Controller,
    autoscaler: Autoscaler,
    leadership: Leadership | SoleLeadership,
    cache: InformerCache,
    feed: Feed,
) -> None:
    # A thread for each worker, the resync, the two loops of scrapes and the two lists of the gateway's pods, and some
    # to resolve names. Python's default depends on the machine.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(settings.workers + 8))
    stopped = asyncio.Event()
    stop_on_signals(stopped.set)
    # kopf cancels every task that was started after it, so these start before it.
    background = [
        *controller.start(),
        asyncio.create_task(leadership.keep(), name="leadership"),
        # It sizes only fleets registered by a reconcile: a standby decides nothing.
        asyncio.create_task(autoscaler.run(), name="autoscaler"),
    ]

    async def keep_watching() -> None:
        # kopf looks up the watched kinds only once: without the CRD it would never watch them.
        await controller.listed.wait()
        await watch(settings, controller.queue, cache, feed)

    stopping = asyncio.create_task(stopped.wait(), name="stop")
    watching = asyncio.create_task(keep_watching(), name="watches")
    try:
        await asyncio.wait({stopping, *background}, return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                _abort(task)
        # The watches stop last: kopf takes seconds, in which another operator can already lead.
        if not await controller.finish(settings.stop_seconds):
            # A hanging reconcile may still write: let the Lease expire instead of releasing it.
            _exit(1)
        await leadership.release()
    finally:
        end_generators_silently(asyncio.get_running_loop())
        tasks: tuple[asyncio.Task[Any], ...] = (stopping, watching, *background)
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=_END_SECONDS)
        if pending:
            logger.warning("did not end within %g s: %s", _END_SECONDS, ", ".join(task.get_name() for task in pending))
            _exit(0)


def _abort(task: asyncio.Task[Any]) -> NoReturn:
    """Exit at once after a background task ended: an orderly shutdown could wait for hanging reconciles."""
    error = task.exception()
    if isinstance(error, LeadershipLost):
        logger.critical("no longer the leader: %s; exiting", error)
    else:
        logger.critical("the task %r ended", task.get_name(), exc_info=error)
    _exit(1)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main()
