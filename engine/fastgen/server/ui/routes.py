"""Routes of the page: static files, which need no API key, and the stream of steps, which needs one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from fastgen.server.http.sse import GeneratedEvents, event
from fastgen.server.serving.service import Service
from fastgen.server.ui.step_feed import StepFeed

_FILES = {
    "/ui": ("page.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/playground.js": ("playground.js", "text/javascript"),
    "/ui/steps.js": ("steps.js", "text/javascript"),
    "/ui/api.js": ("api.js", "text/javascript"),
}
# Served without an API key: they contain no secrets. The page requests everything that it shows with the key.
STATIC_PATHS = frozenset({"/", *_FILES})
_HEADERS = {
    "Cache-Control": "no-cache",
    # Only this server's scripts, styles and connections: a model's text cannot run code or send data.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# Fields of EngineInfo in the first event: the page measures the steps against them.
_LIMITS = ("token_budget", "max_sequences", "max_model_length", "num_blocks", "block_size")


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
    limits = {name: getattr(engine.info, name) for name in _LIMITS}
    yield event({"event": "limits", "model": service.names[0], **limits})
    async with aclosing(feed.watch(lambda on: engine.watch(on=on))) as updates:
        async for update in updates:
            yield event(update)
