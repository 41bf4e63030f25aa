"""Limits on request bodies: size and JSON nesting."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.server.http.request_context import current
from fastgen.server.http.sse import CLIENT_CLOSED_REQUEST

# JSON schemas and tools nest a few dozen levels; a thousand would exhaust Python's stack in later code.
MAX_LEVELS = 100
# Bytes. Parsing this much takes about as long as handing it to a thread.
_LARGE_BODY = 1 << 18


class BodyLimit:
    """Middleware that rejects a body larger than `max_bytes` with 413 as soon as its size is known."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self._max_bytes
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = {"type": "http.request"} if too_large else await receive()
            num_bytes += len(message.get("body", b""))
            if too_large or num_bytes > self._max_bytes:
                limit = self._max_bytes
                size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
                raise HTTPException(413, f"the body is larger than {size}; send a smaller one")
            return message

        await self._app(scope, counted, send)


class JSONRoute(APIRoute):
    """A route whose body must be strict JSON, nested no deeper than `MAX_LEVELS`.

    The standard library's parser accepts NaN, lone surrogates and deep nesting, on which later code fails.

    A large body is first given to the application's `state.check_large_body`, which may reject it unparsed.
    """

    def get_route_handler(self) -> Any:
        """Return FastAPI's handler with strict JSON parsing."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            parsed = _JSONRequest(request.scope, request.receive)
            try:
                body = await parsed.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            current().arrival = time.monotonic()
            if len(body) > _LARGE_BODY:
                request.app.state.check_large_body(body)
            return await handler(parsed)

        return handle


class _JSONRequest(Request):
    async def json(self) -> Any:
        """Parse the body; a large one in a thread.

        Raises:
            JSONDecodeError: if it is not JSON or nested too deeply. FastAPI turns it into a 400.
        """
        body = await self.body()
        return parse(body) if len(body) <= _LARGE_BODY else await asyncio.to_thread(parse, body)


def parse(body: bytes) -> Any:
    """Parse strict JSON.

    Raises:
        JSONDecodeError: if it is not JSON or nested too deeply.
    """
    too_deep = f"nested deeper than {MAX_LEVELS} levels"
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise json.JSONDecodeError(too_deep, "", 0) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    # Fast path: few bodies have more brackets than the allowed depth.
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and _num_levels(value) > MAX_LEVELS:
        raise json.JSONDecodeError(too_deep, "", 0)
    return value


def _num_levels(value: Any) -> int:
    levels, containers = 0, [value]
    while containers:
        levels += 1
        containers = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, dict | list)
        ]
    return levels
