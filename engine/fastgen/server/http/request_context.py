"""Per-request context: id, model name, outcome and cleanup callbacks."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen import logs
from fastgen.text.request_output import Usage

HEADER = "X-Request-Id"
# Visible ASCII, because it goes into log lines and response headers unescaped.
_VALID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a request's generations.

    Attributes:
        response_id: id in the response body.
        usage: tokens of all generations.
        finish_reasons: one per generation; "none" if the client disconnected or the request failed before its end.
        arrival: when the last byte of the request had arrived, in seconds of the monotonic clock.
        queue_seconds: time from arrival to the first step, including tokenization; None if never scheduled.
        first_token_seconds: time from arrival to the first token; None without a token.
        total_seconds: time from arrival to the end.
    """

    response_id: str
    usage: Usage
    finish_reasons: tuple[str, ...]
    arrival: float
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float

    def phases(self) -> list[tuple[str, float, float]]:
        """Return the phases that the request reached, with their start and end in seconds of the monotonic clock."""
        reached = [end for end in (self.queue_seconds, self.first_token_seconds) if end is not None]
        ends = [self.arrival + end for end in (*reached, self.total_seconds)]
        return list(zip(("queue", "prefill", "decode"), (self.arrival, *ends), ends, strict=False))


@dataclass(slots=True)
class RequestContext:
    """Context of one HTTP request.

    Attributes:
        id: the client's X-Request-Id, or a generated one.
        key_digest: digest of the API key; None before it is checked, and without keys.
        model: the model name in the request, once known.
        outcome: set when its generations have ended.
        arrival: when the request had arrived, with its body, in seconds of the monotonic clock.
        is_large: whether the body or the response is so large that work for it runs in a thread: see `off_loop`.
        on_end: callbacks to run when the response has ended, successfully or not.
    """

    id: str
    arrival: float = field(default_factory=time.monotonic)
    key_digest: str | None = None
    model: str | None = None
    outcome: Outcome | None = None
    is_large: bool = False
    on_end: ExitStack = field(default_factory=ExitStack)


_current: ContextVar[RequestContext] = ContextVar("current")


def current() -> RequestContext:
    """Return the context of the current task's request."""
    return _current.get()


class RequestContexts:
    """Outermost middleware: sets the request's context and adds its id to the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        context = RequestContext(given if _VALID.fullmatch(given) else uuid.uuid4().hex)
        # Each request has its own task. The variables are not reset, so uvicorn's later log lines carry the id too.
        _current.set(context)
        logs.request_id.set(context.id)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = context.id
            await send(message)

        with context.on_end:
            await self._app(scope, receive, with_id)
