"""The picker's HTTP server: what the operator asks, the metrics, and the probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.router import Router


def make_app(
    router: Router, metrics: Metrics, is_ready: Callable[[], bool], drain: Callable[[], Awaitable[None]]
) -> web.Application:
    """Return the application.

    Args:
        router: whose demand is told.
        metrics: of the gateway.
        is_ready: whether the first lists were read and requests are served.
        drain: drains the pod.
    """

    async def demand(request: web.Request) -> web.Response:
        return web.json_response(router.demand(request.query.get("after", "")))

    async def exposition(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        ready = is_ready()
        status = "ready" if ready else "reading the first lists of FastGenDeployments and EndpointSlices"
        return web.json_response({"status": status}, status=200 if ready else 503)

    async def prepare_stop(_: web.Request) -> web.Response:
        """Answer a container's preStop hook, which is a GET, once the pod has no request."""
        await drain()
        return web.json_response({"status": "drained"})

    app = web.Application(client_max_size=1 << 10)
    app.add_routes(
        [
            web.get("/demand", demand),
            web.get("/metrics", exposition),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/drain", prepare_stop),
        ]
    )
    return app
