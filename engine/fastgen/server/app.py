"""The ASGI application: endpoints and errors, inside the layers that every request passes."""

from __future__ import annotations

import functools
import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen import logs
from fastgen.config import ServerConfig
from fastgen.core.request import RequestError
from fastgen.server import openapi, probes
from fastgen.server.http import errors, request_context
from fastgen.server.http.auth import KeyCheck, KeyRing
from fastgen.server.http.body_limit import BodyLimit
from fastgen.server.http.errors import APIError
from fastgen.server.http.request_context import RequestContexts
from fastgen.server.http.tracing import Tracer, Traces
from fastgen.server.openai import chat, completions, tokenization
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.service import Service
from fastgen.version import VERSION

log = logging.getLogger("fastgen.server")


def create_app(service: Service, config: ServerConfig, keys: KeyRing, tracer: Tracer | None) -> ASGIApp:
    """The application that serves `service`; `tracer` where traces are wanted."""
    app: ASGIApp = _endpoints(service)
    app = BodyLimit(app, most_bytes=config.max_body_size)
    app = OpenRequests(app, service.lifecycle)
    if keys:
        app = KeyCheck(app, keys, lambda error: _note(service, error))
    if config.allowed_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in config.allowed_origins.split(",")],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[request_context.HEADER, "Retry-After"],
        )
    if tracer is not None:
        app = Traces(app, tracer)
    return RequestContexts(app)


def _endpoints(service: Service) -> FastAPI:
    app = FastAPI(title="FastGen", version=VERSION)
    app.state.service = service
    for router in (completions.router, chat.router, tokenization.router, probes.router):
        app.include_router(router)
    app.openapi = functools.cache(lambda: openapi.document(app))  # type: ignore[method-assign]

    def answer(error: APIError) -> Response:
        if error.code not in ("engine_dead", "deadline_exceeded"):  # those were taken
            _note(service, error)
        return error.response()

    @app.exception_handler(APIError)
    async def _of_api(_: Request, error: APIError) -> Response:
        return answer(error)

    @app.exception_handler(RequestError)
    async def _of_request(_: Request, error: RequestError) -> Response:
        return answer(errors.of_request(error))

    @app.exception_handler(RequestValidationError)
    async def _of_validation(_: Request, error: RequestValidationError) -> Response:
        return answer(errors.of_validation(error))

    @app.exception_handler(HTTPException)
    async def _of_http(_: Request, error: HTTPException) -> Response:
        return answer(errors.of_http(error))

    @app.exception_handler(Exception)
    async def _of_defect(_: Request, error: Exception) -> Response:  # the server logs its traceback
        return APIError(500, f"internal error: {type(error).__name__}", code="internal_error").response()

    return app


def _note(service: Service, error: APIError) -> None:
    """Counts and logs a request that is refused."""
    service.metrics.count_rejected(error.code)
    logs.say(log, "refused", status=error.status, code=error.code, param=error.param or "none")


class OpenRequests:
    """Counts the requests for work that are under way, from their first byte to the last one of the response."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            with self._lifecycle.request():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)
