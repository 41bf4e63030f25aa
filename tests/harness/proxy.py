"""A proxy in front of an API server that records requests and injects faults."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config
from yarl import URL

_HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    body: bytes = field(default=b"", repr=False, compare=False)

    @property
    def is_write(self) -> bool:
        return self.method not in ("GET", "HEAD")

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.query

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch


@dataclass(frozen=True, slots=True)
class Answer:
    """Fault: the proxy responds without forwarding the request, with a Status unless `text` is given."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True, slots=True)
class Hang:
    """Fault: the API server handles the request, but its response never arrives."""


@dataclass(frozen=True, slots=True)
class Slow:
    """Fault: the API server handles the request, but its response arrives `seconds` later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """Fault: the request reaches the API server only when `until` is set, and also if its client is gone by then."""

    until: threading.Event


@dataclass(frozen=True, slots=True)
class Cut:
    """Fault: the API server handles the request, but the connection is reset before its response."""


@dataclass(frozen=True, slots=True)
class Mute:
    """Fault: a watch opens but never sends an event, not even a bookmark."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Fault: a watch that ends with an error event, by default because its resource version has expired (410)."""

    code: int = 410


def overloaded(seconds: int) -> Answer:
    """Return what the API server says beyond its limits on concurrent requests."""
    return Answer(429, {"Retry-After": str(seconds)}, "Too many requests, please try again later.\n")


# What a proxy says that reaches no API server.
UNAVAILABLE = Answer(503, text="no healthy upstream\n")

Fault = Answer | Hang | Slow | Late | Cut | Mute | Gone


class Proxy:
    """Serves HTTP on 127.0.0.1 and forwards to the API server of a kubeconfig, with its credentials.

    Attributes:
        rule: returns the fault to inject for a request, or None. It runs in the proxy's thread.
        before_response, after_response: called with each forwarded request and its status code, before and after the
            client gets the response. Not called for watches.
        arrivals: all requests of the client, with the arrival time in monotonic seconds.
        responses: all forwarded requests except watches, with the status code.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._upstream = Configuration()
        load_kube_config(str(kubeconfig), client_configuration=self._upstream)  # type: ignore[no-untyped-call]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._watches: dict[int, web.Request] = {}
        self._port = 0
        self.rule: Callable[[Request], Fault | None] = lambda _: None
        self.before_response: Callable[[Request, int], None] = lambda *_: None
        self.after_response: Callable[[Request, int], None] = lambda *_: None
        self.responses: list[tuple[Request, int]] = []
        self.arrivals: list[tuple[Request, float]] = []

    def kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig that points to the proxy."""
        named = {"cluster": "proxy", "user": "proxy"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "contexts": [{"name": "proxy", "context": named}],
            "users": [{"name": "proxy", "user": {}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def cut_watches(self) -> None:
        """Reset all open watches, as a restarting load balancer does."""
        asyncio.run_coroutine_threadsafe(self._cut_watches(), self._loop).result(60)

    def send_again(self, request: Request) -> int:
        """Send a request to the API server once more, and return the status code of its response."""
        return asyncio.run_coroutine_threadsafe(self._send_again(request), self._loop).result(120)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> None:
        context = ssl.create_default_context(cafile=self._upstream.ssl_ca_cert)
        assert self._upstream.cert_file is not None
        context.load_cert_chain(self._upstream.cert_file, self._upstream.key_file)
        self._session = ClientSession(
            connector=TCPConnector(ssl=context, limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
        )
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._cut_watches()
        await self._runner.cleanup()
        await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _cut_watches(self) -> None:
        for request in list(self._watches.values()):
            _abort(request)

    async def _send_again(self, seen: Request) -> int:
        async with self._forwarded(seen, f"{seen.path}?{seen.query}") as upstream:
            return int(upstream.status)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Request(request.method, request.path, request.query_string, _end_to_end(request.headers), body)
        self.arrivals.append((seen, time.monotonic()))
        fault = self.rule(seen)
        if isinstance(fault, Answer):
            return web.Response(status=fault.status, headers=fault.headers, text=fault.text or _status(fault.status))
        if isinstance(fault, Mute | Gone):
            return await self._watch_falsely(request, fault)
        if seen.is_watch:
            return await self._stream(request, seen)
        sending = asyncio.ensure_future(self._send(seen, request.path_qs, fault))
        # aiohttp cancels the handler of a client that disconnects. What is on its way arrives all the same.
        status, kept, data = await (asyncio.shield(sending) if isinstance(fault, Late) else sending)
        self.before_response(seen, status)
        if isinstance(fault, Cut):
            _abort(request)
        if isinstance(fault, Hang | Slow):
            await asyncio.sleep(3600 if isinstance(fault, Hang) else fault.seconds)
        answer = web.Response(status=status, headers=kept, body=data)
        await answer.prepare(request)
        await answer.write_eof()
        self.after_response(seen, status)
        return answer

    def _forwarded(self, seen: Request, path_and_query: str) -> Any:
        """Return the context of the request to the API server; the path and query are encoded."""
        url = URL(self._upstream.host + path_and_query, encoded=True)
        return self._session.request(
            seen.method, url, data=seen.body or None, headers=seen.headers, skip_auto_headers=("Content-Type",)
        )

    async def _send(self, seen: Request, path_and_query: str, fault: Fault | None) -> tuple[int, dict[str, str], bytes]:
        """Forward a request; return the status, headers and body of the response."""
        if isinstance(fault, Late):
            await asyncio.to_thread(fault.until.wait)
        async with self._forwarded(seen, path_and_query) as upstream:
            data = await upstream.read()
            self.responses.append((seen, upstream.status))
            return upstream.status, _end_to_end(upstream.headers), data

    async def _stream(self, request: web.Request, seen: Request) -> web.StreamResponse:
        """Forward a watch."""
        async with self._forwarded(seen, request.path_qs) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers=_end_to_end(upstream.headers))
            self._watches[id(request)] = request
            try:
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
            finally:
                del self._watches[id(request)]
            return answer

    async def _watch_falsely(self, request: web.Request, fault: Mute | Gone) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        if isinstance(fault, Mute):
            self._watches[id(request)] = request
            try:
                await asyncio.sleep(3600)
            finally:
                del self._watches[id(request)]
        code = fault.code if isinstance(fault, Gone) else 410
        await answer.write(b'{"type":"ERROR","object":' + _status(code).encode() + b"}\n")
        await answer.write_eof()
        return answer


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that a proxy passes on."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _status(code: int) -> str:
    """Return the body of an API server's error response."""
    return json.dumps(
        {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": f"injected {code}"}
    )
