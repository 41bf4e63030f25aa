"""The ASGI application: endpoints, errors, and a limit on what a client may send."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.core.request import RequestError
from fastgen.server import chat, completions, errors, probes
from fastgen.server.errors import APIError
from fastgen.server.lifecycle import Lifecycle
from fastgen.server.service import Service
from fastgen.version import VERSION

log = logging.getLogger("fastgen.server")

# Far more than the longest prompt of any model here, and little enough to read into memory.
_MOST_BODY_BYTES = 16 << 20


def create_app(service: Service) -> FastAPI:
    """The application that serves `service`."""
    app = FastAPI(title="FastGen", version=VERSION)
    app.state.service = service
    for router in (completions.router, chat.router, probes.router):
        app.include_router(router)
    app.add_middleware(BodyLimit, most_bytes=_MOST_BODY_BYTES)
    app.add_middleware(OpenRequests, lifecycle=service.lifecycle)

    def answer(error: APIError) -> Response:
        if error.status != 500:  # those were taken
            service.metrics.count_rejected(error.code)
            log.info("refused status=%d code=%s param=%s", error.status, error.code, error.param or "none")
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


class BodyLimit:
    """Refuses a body larger than `most_bytes` with 413 as soon as that is known."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, counting what comes."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._most_bytes:
                raise HTTPException(413, f"the body is larger than {self._most_bytes >> 20} MiB: send less")
            return message

        await self._app(scope, counted, send)
