"""What belongs to one HTTP request from its first byte to the end of its response: an id, a span, things to undo."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen import logs

HEADER = "X-Request-Id"
# Visible ASCII: it goes into log lines and response headers as it is.
_VALID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the generations that a request asked for.

    Attributes:
        response_id: the id in the response's body.
        finish_reasons: one for each generation, "none" for those that were left before their end.
        arrival: when the request was taken, of the monotonic clock.
        queue_seconds: from then to the first pass for it; None where it was in none.
        first_token_seconds: from then to the first token; None where none came.
        total_seconds: from then to the end.
    """

    response_id: str
    prompt_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]
    arrival: float
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float

    def parts(self) -> list[tuple[str, float, float]]:
        """What the time went into, each with its begin and its end, of the monotonic clock."""
        times = (self.queue_seconds, self.first_token_seconds, self.total_seconds)
        parts, began = [], 0.0
        for name, ended in zip(("queue", "prefill", "decode"), times, strict=True):
            if ended is not None:
                parts.append((name, self.arrival + began, self.arrival + ended))
                began = ended
        return parts


@dataclass(slots=True)
class RequestContext:
    """One request's belongings.

    Attributes:
        id: the client's X-Request-Id, or one made here.
        model: the name that the model was called by, once that is known.
        outcome: set when its generations are over.
        on_end: what to call when the response is over, however that comes about.
    """

    id: str
    model: str | None = None
    outcome: Outcome | None = None
    on_end: ExitStack = field(default_factory=ExitStack)

    def at_end(self, call: Callable[[], object]) -> None:
        """Calls `call` when the response is over."""
        self.on_end.callback(call)


_current: ContextVar[RequestContext] = ContextVar("current")


def current() -> RequestContext:
    """The context of the request that the running task works on."""
    return _current.get()


class RequestContexts:
    """The outermost layer: gives each request its context, and each response the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        context = RequestContext(given if _VALID.fullmatch(given) else uuid.uuid4().hex)
        # Each request has a task of its own, so neither is reset: the HTTP server's own words on it get the id too.
        _current.set(context)
        logs.request_id.set(context.id)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = context.id
            await send(message)

        with context.on_end:
            await self._app(scope, receive, with_id)
