"""Stand-ins for an API server and for replicas: they run in a thread of the test's process, on free ports."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry

from cluster.controlplane import free_ports
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.held_requests import HoldLimits
from fastgen_gateway.routing.router import Router
from support.waiting import PATIENCE

T = TypeVar("T")
_SLICES, _DEPLOYMENTS = "endpointslices", "fastgendeployments"


def gateway_registry() -> CollectorRegistry:
    """Return the metrics of a gateway without requests."""

    def clock() -> float:
        return 0.0

    return Metrics(Router(clock, HoldLimits()), ClientLimits(clock)).registry


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stand-ins", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE * 30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE * 10)


class _Site:
    """An aiohttp application at an address and port that stay the same when it stops and starts."""

    def __init__(
        self,
        loop: LoopThread,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
        host: str = "127.0.0.1",
    ) -> None:
        self.loop, self.host, self.port = loop, host, free_ports(1)[0]
        self._handler = handler
        self._runner: web.AppRunner | None = None
        self.start()

    def start(self) -> None:
        async def start() -> web.AppRunner:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", self._handler)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, self.host, self.port, backlog=4096).start()
            return runner

        self._runner = self.loop.run(start())

    def stop(self) -> None:
        """Stop listening and close all connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            self.loop.run(runner.cleanup())


def _reset(request: web.Request) -> None:
    """Close a request's connection with a reset."""
    assert request.transport is not None
    connection = request.transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()


def compact(body: dict[str, Any]) -> bytes:
    """Return JSON without spaces, as engines write it."""
    return json.dumps(body, separators=(",", ":")).encode()


def usage_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the usage that a body asks for."""
    if "usage" not in fields:
        return {}
    prompt, completion = fields["usage"]
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"usage": usage}


@dataclass
class Received:
    """A request as a replica got it."""

    path: str
    body: bytes
    headers: Mapping[str, str]  # names in lower case


class ReplicaStandIn:
    """A replica that answers at once, or as its `mode` says: serve, reset, draining or busy.

    A body with `events` is streamed: so many events, `gap` seconds apart, or with `gated` each after a call of
    `permit`; with `cut`, the connection is reset after as many. One with `seconds` is answered after that time, and one
    with `usage` with these tokens of prompt and output. With `padding`, so many bytes come before the usage; with
    `split`, the last bytes come one by one.

    Attributes:
        metrics: values by name, without the prefix and with labels besides the model's; None for 404.
    """

    def __init__(self, loop: LoopThread, name: str, host: str = "127.0.0.1") -> None:
        self.name, self.mode = name, "serve"
        self.received: list[Received] = []
        self.num_disconnects = self.num_running = self.most_running = 0
        self.metrics: dict[str, float] | None = None
        self.model = "m"
        self._loop = loop
        self._permits = asyncio.Semaphore(0)
        self._site = _Site(loop, self._answer, host)

    @property
    def address(self) -> str:
        return f"{self._site.host}:{self._site.port}"

    def stop(self) -> None:
        self._site.stop()

    def start(self) -> None:
        self._site.start()

    def permit(self) -> None:
        """Let a gated stream send its next event."""
        self._loop.loop.call_soon_threadsafe(self._permits.release)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            return self._exposition()
        body = await request.read()
        self.received.append(
            Received(request.path_qs, body, {name.lower(): value for name, value in request.headers.items()})
        )
        if self.mode == "reset":
            _reset(request)
        if self.mode == "draining":
            return web.json_response({"error": {}}, status=503, headers={"x-fastgen-draining": "1"})
        if self.mode == "busy":
            return web.json_response({"error": {"code": "queue_full"}}, status=503)
        fields = json.loads(body)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(fields.get("seconds", 0))
            if "events" in fields:
                return await self._stream(request, fields)
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_disconnects += 1
            raise
        finally:
            self.num_running -= 1
        answer = {"served_by": self.name, "model": fields["model"], "bytes": len(body)}
        text = compact(answer | {"padding": "x" * fields.get("padding", 0)} | usage_of(fields))
        if "split" in fields:
            return await self._split(request, text)
        return web.Response(body=text, content_type="application/json")

    async def _split(self, request: web.Request, text: bytes) -> web.StreamResponse:
        """Send a response with its last bytes one by one."""
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        await response.write(text[:-100])
        for byte in text[-100:]:
            await response.write(bytes([byte]))
            await asyncio.sleep(0.002)
        return response

    async def _stream(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(fields["events"]):
            if fields.get("gated"):
                await self._permits.acquire()
            await response.write(f"data: {self.name} {number}\n\n".encode())
            if fields.get("cut") == number:
                _reset(request)
            await asyncio.sleep(fields.get("gap", 0))
        if "usage" in fields:
            await response.write(b"data: " + compact(usage_of(fields)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _exposition(self) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        lines = []
        for name, value in self.metrics.items():
            base, _, label = name.partition("{")
            labels = f'{{model_name="{self.model}"{"," + label[:-1] if label else ""}}}'
            lines.append(f"fastgen_{base}{labels} {value}")
        return web.Response(text="\n".join(lines) + "\n")


@dataclass
class _Kind:
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    watchers: set[asyncio.Queue[dict[str, Any] | None]] = field(default_factory=set)
    num_lists: int = 0
    listed: str = ""


class ApiServerStandIn:
    """Lists, in pages, and watches of FastGenDeployments and EndpointSlices, without label selectors.

    Attributes:
        status: HTTP status of all responses, if not 200.
        most_objects: a longer page of a list takes an hour.
        paths: paths of the last requests.
        too_long: paths of the requests for pages of more objects than `most_objects`.
        deep: JSON that takes the place of each text `DEEP` in an object.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._kinds = {_SLICES: _Kind(), _DEPLOYMENTS: _Kind()}
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        self.status = 200
        self.most_objects = 1 << 20
        self.deep = "{}"
        self.paths: deque[str] = deque(maxlen=100)
        self.too_long: list[str] = []
        self._site = _Site(loop, self._answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._site.port}"

    def stop(self) -> None:
        self._site.stop()

    def start(self) -> None:
        self._site.start()

    def num_lists(self, kind: str = _DEPLOYMENTS) -> int:
        return self._kinds[kind].num_lists

    def deployment(
        self,
        name: str,
        namespace: str = "default",
        model: str | None = None,
        created: str = "2026-01-01T00:00:00Z",
        canary_percent: int = 0,
    ) -> None:
        """Create or change an exposed FastGenDeployment."""
        spec = {"gateway": {"expose": True}, "model": {"servedName": model} if model else {}}
        status = {"canary": {"percent": canary_percent}} if canary_percent else {}
        self.put(_DEPLOYMENTS, namespace, name, {"spec": spec, "status": status}, creationTimestamp=created)

    def endpoints(
        self, name: str, *addresses: str, namespace: str = "default", leaving: tuple[str, ...] = (), owner: str = ""
    ) -> None:
        """Set the ready endpoints of a Service, one slice for each port; `leaving` ones are ready and terminating.

        Args:
            owner: the FastGenDeployment, if it has another name than the Service.
        """
        labels = {"kubernetes.io/service-name": name, "fastgen.dev/deployment": owner or name}
        previous = [
            key
            for key, found in self._kinds[_SLICES].objects.items()
            if key[0] == namespace and found["metadata"]["labels"]["kubernetes.io/service-name"] == name
        ]
        wanted = {f"{name}-{address.rpartition(':')[2]}": address for address in (*addresses, *leaving)}
        for _, gone in previous:
            if gone not in wanted:
                self.delete(_SLICES, namespace, gone)
        for slice_name, address in wanted.items():
            host, _, port = address.rpartition(":")
            conditions = {"ready": True, "serving": True, "terminating": address in leaving}
            endpoint = {
                "addresses": [host],
                "conditions": conditions,
                "targetRef": {"uid": f"uid-{port}", "name": f"{name}-{port}"},
            }
            content = {"addressType": "IPv4", "endpoints": [endpoint], "ports": [{"name": "http", "port": int(port)}]}
            self.put(_SLICES, namespace, slice_name, content, labels=labels)

    def put(self, kind: str, namespace: str, name: str, content: dict[str, Any], **metadata: Any) -> None:
        """Create or change an object."""

        async def put() -> None:
            found = self._kinds[kind]
            event = "MODIFIED" if (namespace, name) in found.objects else "ADDED"
            version = {"namespace": namespace, "name": name, "resourceVersion": str(next(self._versions))}
            found.objects[namespace, name] = {"metadata": {**version, **metadata}, **content}
            self._change(found, {"type": event, "object": found.objects[namespace, name]})

        self._loop.run(put())

    def delete(self, kind: str, namespace: str, name: str) -> None:
        async def delete() -> None:
            found = self._kinds[kind]
            gone = found.objects.pop((namespace, name))
            metadata = {**gone["metadata"], "resourceVersion": str(next(self._versions))}
            self._change(found, {"type": "DELETED", "object": {**gone, "metadata": metadata}})

        self._loop.run(delete())

    def clear(self) -> None:
        """Delete all objects."""
        for kind, found in self._kinds.items():
            for namespace, name in tuple(found.objects):
                self.delete(kind, namespace, name)

    def expire(self) -> None:
        """End all watches because their versions are too old; new watches must list first."""

        async def expire() -> None:
            for found in self._kinds.values():
                await self._watched(found)
                self._send(found, {"type": "ERROR", "object": {"code": 410, "message": "too old"}})

        self._loop.run(expire())

    def send_faulty(self, kind: str, faulty: dict[str, Any]) -> None:
        """Send an event with a faulty object to the watches of a kind; with a version, if it has metadata."""

        async def send() -> None:
            if "metadata" in faulty:
                faulty["metadata"]["resourceVersion"] = str(next(self._versions))
            await self._watched(self._kinds[kind])
            self._send(self._kinds[kind], {"type": "ADDED", "object": faulty})

        self._loop.run(send())

    def end_watches(self) -> None:
        """End all watches, as the API server does after their time."""

        async def end() -> None:
            for found in self._kinds.values():
                self._send(found, None)

        self._loop.run(end())

    @classmethod
    def _change(cls, found: _Kind, event: dict[str, Any]) -> None:
        found.events.append(event)
        cls._send(found, event)

    @staticmethod
    async def _watched(found: _Kind) -> None:
        """Wait until a watch of the kind is open."""
        async with asyncio.timeout(PATIENCE * 20):
            while not found.watchers:
                await asyncio.sleep(0.01)

    @staticmethod
    def _send(found: _Kind, event: dict[str, Any] | None) -> None:
        for watcher in found.watchers:
            watcher.put_nowait(event)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if self.status != 200:
            return web.json_response({"kind": "Status", "message": "a fault of the test"}, status=self.status)
        found = self._kinds[request.path.rpartition("/")[2]]
        if "watch" not in request.query:
            if int(request.query["limit"]) > self.most_objects:
                self.too_long.append(request.path)
                await asyncio.sleep(3600)
            return self._page(found, int(request.query["limit"]), int(request.query.get("continue", 0)))
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for each in found.events:
            if int(each["object"]["metadata"]["resourceVersion"]) > since:
                events.put_nowait(each)
        found.watchers.add(events)
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    while (event := await events.get()) is not None:
                        await response.write(self._text(event) + b"\n")
        finally:
            found.watchers.discard(events)
        return response

    def _page(self, found: _Kind, limit: int, begin: int) -> web.Response:
        if not begin:
            found.num_lists += 1
            found.listed = str(next(self._versions))
        items, end = [*found.objects.values()], begin + limit
        more = {"continue": str(end)} if end < len(items) else {}
        page = {"metadata": {"resourceVersion": found.listed, **more}, "items": items[begin:end]}
        return web.Response(body=self._text(page), content_type="application/json")

    def _text(self, value: dict[str, Any]) -> bytes:
        return json.dumps(value).replace('"DEEP"', self.deep).encode()
