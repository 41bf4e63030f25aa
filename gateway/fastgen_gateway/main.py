"""Entry point: assembles the picker, and stops its parts in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import NoReturn

import uvloop
from aiohttp import web

from fastgen import logs
from fastgen_gateway.client_files import follow_clients, read_clients
from fastgen_gateway.cluster.api_server import ApiServer
from fastgen_gateway.cluster.view import ClusterView
from fastgen_gateway.envoy_admin import drain_envoy
from fastgen_gateway.ext_proc.holding import Holding
from fastgen_gateway.ext_proc.incoming_bodies import IncomingBodies
from fastgen_gateway.ext_proc.picker import Picker
from fastgen_gateway.ext_proc.server import start_server
from fastgen_gateway.http_server import make_app
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.pool_certificate import write_certificate
from fastgen_gateway.routing.access import Access
from fastgen_gateway.routing.router import Router
from fastgen_gateway.scraping import scrape_replicas
from fastgen_gateway.settings import Settings, parse_settings

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the picker until SIGTERM or SIGINT.

    Exits with code 2 if the settings are invalid, a file cannot be read or a port cannot be used.
    """
    settings = parse_settings(arguments)
    logs.configure(settings.log_format)
    access = Access(time.monotonic)
    try:
        if settings.clients is not None:
            access.set_clients(read_clients(settings.clients))
    except (OSError, ValueError) as error:
        _exit_usage(f"API keys and limits of clients: {error}")
    try:
        if settings.pool_certificate is not None:
            # Envoy reads it when it starts, after the picker's startup probe has passed.
            write_certificate(settings.pool_certificate)
        uvloop.run(_run(settings, access))
    except OSError as error:
        _exit_usage(str(error))


async def _run(settings: Settings, access: Access) -> None:
    router = Router(time.monotonic, settings.limits)
    metrics = Metrics(router, access.limits)
    holding = Holding(router)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ApiServer(settings.api_server))
        view = ClusterView(server, settings.namespaces, router, holding.release, metrics.watch_failed)
        serving = asyncio.Event()

        async def drain() -> None:
            router.is_draining = True
            holding.release()
            await drain_envoy(settings.admin_port)

        runner = web.AppRunner(make_app(router, metrics, serving.is_set, drain), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, settings.http_address, settings.http_port).start()
        background = [
            asyncio.create_task(view.run(), name="watches"),
            asyncio.create_task(holding.run(), name="holding"),
            asyncio.create_task(scrape_replicas(router, metrics, holding.release), name="scrapes"),
        ]
        if settings.clients is not None:
            background.append(asyncio.create_task(follow_clients(settings.clients, access.set_clients), name="keys"))
        stopped = asyncio.create_task(_stop_signal(), name="stop")
        # Envoy holds requests back while the picker does not listen. A model that was not listed yet would be unknown.
        listed = asyncio.create_task(view.listed.wait(), name="lists")
        try:
            await asyncio.wait({listed, stopped, *background}, return_when=asyncio.FIRST_COMPLETED)
            if listed.done():
                bodies = IncomingBodies(settings.max_bodies_bytes)
                seconds = settings.limits.seconds, settings.body_seconds
                service = Picker(router, access, holding, *seconds, bodies, metrics)
                picker = await start_server(service, settings.picker_address, settings.picker_port)
                stack.push_async_callback(picker.stop, None)
                serving.set()
                logger.info("serving %d models", len(router.models.names()))
                await asyncio.wait({stopped, *background}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.clear()
            for task in (stopped, listed, *background):
                task.cancel()
            ended = await asyncio.gather(*background, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error


async def _stop_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


def _exit_usage(message: str) -> NoReturn:
    print(f"fastgen-gateway: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
