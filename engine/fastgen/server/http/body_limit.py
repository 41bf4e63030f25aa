"""Limits on the bytes of request bodies: of each one, and of all that a process holds."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.server.http.api_error import APIError

# Bodies up to this size are received whatever the others hold. The number of connections bounds what they add.
SMALL_BYTES = 1 << 16
# Bodies that arrive slowly are rejected within a minute, and most requests end within seconds.
_RETRY_SECONDS = 5


class BodyBudget:
    """Bounds the bytes of all bodies that are being received or served.

    Beyond the bound, the largest bodies that have not arrived in full are rejected, except small ones. So a client with
    large unfinished bodies does not keep others out.

    Args:
        max_bytes: of all bodies together. Small ones count, too, but are not rejected.

    Attributes:
        num_bytes: bytes of all bodies now.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arriving: set[HeldBody] = set()
        self.num_bytes = 0

    def add(self, body: HeldBody, num_bytes: int) -> None:
        """Count further bytes of a body that is arriving; reject bodies if all together have too many."""
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._arriving.add(body)
        while self.num_bytes > self._max_bytes and self._arriving:
            largest = max(self._arriving, key=lambda arriving: arriving.num_bytes)
            if largest.num_bytes <= SMALL_BYTES:
                break
            self.remove(largest)
            largest.reject()

    def complete(self, body: HeldBody) -> None:
        """Record that a body has arrived. Its bytes count until it is removed."""
        self._arriving.discard(body)

    def remove(self, body: HeldBody) -> None:
        """Forget a body that was rejected or whose response has ended."""
        self._arriving.discard(body)
        self.num_bytes -= body.num_bytes
        body.num_bytes = 0


class HeldBody:
    """The bytes that the server holds of one request's body.

    Attributes:
        num_bytes: bytes that have arrived; 0 once the body is rejected or its response has ended.
        is_complete: whether the whole body has arrived.
    """

    __slots__ = ("_rejected", "is_complete", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_complete = False
        self._rejected = asyncio.Event()

    def reject(self) -> None:
        """Make `check` raise APIError, and also a `next_message` that is waiting."""
        self._rejected.set()

    def check(self) -> None:
        """Raise APIError 503 if the body has been rejected."""
        if self._rejected.is_set():
            raise APIError(
                503,
                "the bodies of all requests together are too large; try again later, or send a smaller one",
                code="bodies_too_large",
                retry_after=_RETRY_SECONDS,
            )

    async def next_message(self, receive: Receive) -> Message:
        """Return the next message of the request.

        Raises:
            APIError: 503 if the body is rejected while the rest of it is awaited.
        """
        if self.is_complete or not self.num_bytes:
            return await receive()
        receiving = asyncio.ensure_future(receive())
        rejected = asyncio.ensure_future(self._rejected.wait())
        try:
            await asyncio.wait((receiving, rejected), return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return receiving.result()
        finally:
            receiving.cancel()
            rejected.cancel()


class BodyLimit:
    """Middleware that rejects a body larger than `max_bytes` with 413, and one that the budget rejects with 503."""

    def __init__(self, app: ASGIApp, max_bytes: int, budget: BodyBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self._max_bytes
        held = HeldBody()

        async def counted() -> Message:
            if too_large:
                raise self._too_large()
            message = await held.next_message(receive)
            if message["type"] == "http.request" and not held.is_complete:
                num_bytes = len(message.get("body", b""))
                if held.num_bytes + num_bytes > self._max_bytes:
                    raise self._too_large()
                self._budget.add(held, num_bytes)
                held.check()
                if not message.get("more_body", False):
                    held.is_complete = True
                    self._budget.complete(held)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._budget.remove(held)

    def _too_large(self) -> HTTPException:
        limit = self._max_bytes
        size = f"{limit >> 20} MiB" if limit % (1 << 20) == 0 else f"{limit} bytes"
        return HTTPException(413, f"the body is larger than {size}; send a smaller one")
