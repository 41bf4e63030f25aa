"""What a client may send: how large a body, and how deeply nested."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# JSON schemas and tools nest a few dozen levels at most; a thousand would exhaust Python's stack further on.
MOST_LEVELS = 100


class BodyLimit:
    """Refuses a body larger than `most_bytes` with 413 as soon as that is known."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, counting what comes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self._most_bytes
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = {"type": "http.request"} if too_large else await receive()
            num_bytes += len(message.get("body", b""))
            if too_large or num_bytes > self._most_bytes:
                limit = self._most_bytes
                words = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
                raise HTTPException(413, f"the body is larger than {words}: send less")
            return message

        await self._app(scope, counted, send)


class JSONRoute(APIRoute):
    """A route whose body is JSON to the letter, and nested no deeper than `MOST_LEVELS`.

    The standard library's parser takes NaN, lone surrogates and any nesting that its stack bears, and what comes after
    it fails on them.
    """

    def get_route_handler(self) -> Any:
        """FastAPI's handler, with a request that parses so."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JSONRequest(request.scope, request.receive))

        return handle


class _JSONRequest(Request):
    async def json(self) -> Any:
        """The body, parsed.

        Raises:
            JSONDecodeError: when it is not JSON, or nested too deeply. FastAPI makes a 400 of it.
        """
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """A JSON text as Python's objects.

    Raises:
        JSONDecodeError: when it is not JSON, or nested too deeply.
    """
    too_deep = f"nested deeper than {MOST_LEVELS} levels"
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise json.JSONDecodeError(too_deep, "", 0) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    # Nearly every body has fewer brackets than levels are allowed.
    if body.count(b"[") + body.count(b"{") > MOST_LEVELS and _num_levels(value) > MOST_LEVELS:
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
