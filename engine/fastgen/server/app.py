"""The ASGI application: endpoints, error handlers and middleware."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen import logs
from fastgen.core.request_error import RequestError
from fastgen.server import openapi, probes
from fastgen.server.http import host_check, request_context
from fastgen.server.http.api_error import APIError, FailedRequest, from_exception
from fastgen.server.http.auth import OPEN_PATHS, KeyCheck, KeyRing
from fastgen.server.http.body_limit import BodyBudget, BodyLimit
from fastgen.server.http.connection import is_kept
from fastgen.server.http.host_check import HostCheck
from fastgen.server.http.request_context import RequestContexts
from fastgen.server.http.tracing import Tracer, Traces
from fastgen.server.openai import completions, tokenization
from fastgen.server.openai.chat import endpoint as chat
from fastgen.server.openai.other_routes import missing_route
from fastgen.server.openai.pooling import embeddings, rerank
from fastgen.server.openai.responses import endpoint as responses
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.metrics_exchange import MetricsExchange
from fastgen.server.serving.service import Service
from fastgen.server.ui import routes as ui
from fastgen.server.ui.step_feed import StepFeed
from fastgen.settings import ServerConfig
from fastgen.text.grammars.checker import CheckerUnavailable
from fastgen.version import VERSION

log = logging.getLogger("fastgen.server")


def create_app(
    service: Service,
    config: ServerConfig,
    keys: KeyRing,
    tracer: Tracer | None,
    steps: StepFeed | None = None,
    exchange: MetricsExchange | None = None,
) -> ASGIApp:
    """Return the application.

    Args:
        service: state shared by the endpoints.
        config: the server's settings.
        keys: valid API keys.
        tracer: None if tracing is off.
        steps: step reports for the page at /ui; None if there is no page.
        exchange: reads the metrics of the other API processes; None if /metrics has those of this process only.
    """
    endpoints = _endpoints(service)
    endpoints.state.exchange = exchange
    if steps is not None:
        endpoints.include_router(ui.router(steps))
    app: ASGIApp = endpoints
    budget = BodyBudget(max(config.max_bodies_size, config.max_body_size))
    app = BodyLimit(app, config.max_body_size, budget)
    app = OpenRequests(app, service.lifecycle, lambda error: _record_rejection(service, error))
    if keys:
        open_paths = OPEN_PATHS if steps is None else OPEN_PATHS | ui.STATIC_PATHS
        app = KeyCheck(app, keys, lambda error: _record_rejection(service, error), open_paths)
    if config.allowed_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in config.allowed_origins.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[request_context.HEADER, "Retry-After"],
        )
    if config.allowed_hosts != host_check.AUTO or not keys:
        app = HostCheck(app, config.allowed_hosts, lambda error: _record_rejection(service, error))
    if tracer is not None:
        app = Traces(app, tracer)
    return RequestContexts(app)


def _endpoints(service: Service) -> FastAPI:
    # FastAPI's documentation pages load scripts from another site.
    app = FastAPI(title="FastGen", version=VERSION, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.check_large_body = service.check_large_body
    for module in (completions, chat, responses, embeddings, rerank, tokenization, probes):
        app.include_router(module.router)
    app.openapi = functools.cache(lambda: openapi.document(app))  # type: ignore[method-assign]

    async def respond(request: Request, exception: Exception) -> Response:
        error = from_exception(exception)
        stored = request.method == "GET" and request.url.path in ("/v1/chat/completions", "/v1/responses")
        if isinstance(exception, HTTPException) and (error.status == 404 or stored):
            error = missing_route(request.method, request.url.path)
        if not isinstance(error, FailedRequest):
            _record_rejection(service, error)
        return error.response()

    for kind in (APIError, RequestError, CheckerUnavailable, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
    return app


def _record_rejection(service: Service, error: APIError) -> None:
    """Count and log a rejected request."""
    service.metrics.count_rejected(error.code)
    logs.log_event(log, "rejected", status=error.status, code=error.code, param=error.param or "none")


class OpenRequests:
    """Middleware that counts POST requests as open until the last byte of the response is sent.

    While the server drains, it rejects them on new connections with 503.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, on_rejection: Callable[[APIError], object]) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._on_rejection = on_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._lifecycle.check_connection(kept=is_kept(scope))
        except APIError as error:
            self._on_rejection(error)
            await error.response()(scope, receive, send)
            return
        with self._lifecycle.open_request():
            await self._app(scope, receive, send)
