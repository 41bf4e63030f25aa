"""Routes of the page: static files, which need no key, and the stream of steps, which does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from fastgen.server.http.errors import APIError
from fastgen.server.http.sse import GeneratedEvents, event
from fastgen.server.serving.service import Service
from fastgen.server.ui.step_feed import StepFeed, TooManyWatchersError

_FILES = {
    "/ui": ("page.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/playground.js": ("playground.js", "text/javascript"),
    "/ui/steps.js": ("steps.js", "text/javascript"),
    "/ui/api.js": ("api.js", "text/javascript"),
}
# The page and the way to it have no secrets. Everything that they show is requested with the key.
STATIC_PATHS = frozenset({"/", *_FILES})
_HEADERS = {
    "Cache-Control": "no-cache",
    # No script, style or connection but this server's: a model's text can never run or send anything.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Limits(msgspec.Struct, frozen=True, tag="limits", tag_field="event"):
    """The first event of the stream: what the numbers of the updates are measured against."""

    model: str
    token_budget: int
    max_sequences: int
    max_model_length: int
    num_blocks: int
    block_size: int


def router(feed: StepFeed) -> APIRouter:
    """Return the routes of the page."""
    routes = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        body = Path(__file__).with_name(name).read_bytes()
        routes.add_api_route(path, _static(body, media_type), methods=["GET"])

    @routes.get("/")
    async def root() -> Response:
        return RedirectResponse("ui")

    @routes.get("/ui/steps")
    async def steps(request: Request) -> Response:
        service: Service = request.app.state.service
        service.lifecycle.model()  # 503 while it loads
        return GeneratedEvents(_events(feed, service))

    return routes


def _static(body: bytes, media_type: str) -> Any:
    async def file() -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)

    return file


async def _events(feed: StepFeed, service: Service) -> AsyncGenerator[bytes]:
    engine = service.lifecycle.model().engine
    info = engine.info
    yield event(
        Limits(
            service.names[0],
            info.token_budget,
            info.max_sequences,
            info.max_model_length,
            info.num_blocks,
            info.block_size,
        )
    )
    try:
        async with aclosing(feed.watch(lambda on: engine.watch(on=on))) as updates:
            async for update in updates:
                yield event(update)
    except TooManyWatchersError:
        raise APIError(503, "too many watchers: close another page", code="too_many_watchers") from None
