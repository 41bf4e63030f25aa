"""A node of a bare control plane with a kubelet that serves logs and forwards ports, and runs no containers.

The API server in front of it is the real one: it checks the user's rights, finds the node and passes the request on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from aiohttp import WSMsgType, web

from cluster.controlplane import ControlPlane, free_ports
from cluster.pki import Authority
from fastgen_operator.kinds import LEASE
from fastgen_operator.kube.transport import KubeError
from harness.adverse import bind
from harness.space import Space
from support.namespace import Object

# The protocol of port forwarding over a websocket: a channel byte before each message, even for data, odd for errors.
_PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = b"\0", b"\1"
_RENEW_SECONDS = 5.0


@dataclass
class Kubelet:
    """The kubelet of one node. Use it as a context manager.

    Attributes:
        logs: lines by pod and container; before the container's last restart: by pod and "CONTAINER/previous".
        ports: where the ports of pods are, by pod and port.
        forwarded: the pods to which ports were forwarded, in order.
    """

    plane: ControlPlane
    node: str
    logs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    ports: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    forwarded: list[str] = field(default_factory=list)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        pki = self.plane.folder / "pki"
        Authority.open(pki).issue("kubelet", f"system:node:{self.node}", hosts=["127.0.0.1"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki / "kubelet.crt", pki / "kubelet.key")
        (port,) = free_ports(1)
        started = threading.Event()
        threading.Thread(target=self._serve, args=(port, context, started), daemon=True).start()
        assert started.wait(60)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.node},
            "status": {
                "capacity": {"cpu": "8", "memory": "32Gi", "pods": "20"},
                "conditions": [{**ready, "reason": "Test"}],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            },
        }
        self.plane.kubectl("create", "--filename", "-", stdin=json.dumps(node))
        threading.Thread(target=self._renew, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self.plane.kubectl("delete", "node", self.node, "--ignore-not-found")
        self._loop.call_soon_threadsafe(self._loop.stop)

    def run(self, space: Space, pod: Object, address: str, port: int = 8000) -> None:
        """Let the pod run on the node, ready, with that address; its port is forwarded to it."""
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            bind(space, pod, self.node)
        space.set_pod(pod, ready=True)
        space.patch(f"pod/{name}", {"status": {"podIP": address, "podIPs": [{"ip": address}]}}, "status")
        self.ports[name, port] = (address, port)

    def _renew(self) -> None:
        """Renew the node's Lease, as a kubelet does: otherwise its pods are not ready after a while."""
        server = Space(self.plane, "kube-node-lease").server
        while not self._closing.is_set():
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"holderIdentity": self.node, "leaseDurationSeconds": 40, "renewTime": now}
            body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": {"name": self.node}, "spec": spec}
            path, query = LEASE.path("kube-node-lease", self.node), [("fieldManager", "kubelet")]
            with suppress(KubeError):
                server.request("PATCH", path, query, body, "application/apply-patch+yaml")
            self._closing.wait(_RENEW_SECONDS)

    def _serve(self, port: int, context: ssl.SSLContext, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _log(self, request: web.Request) -> web.StreamResponse:
        pod, container = request.match_info["pod"], request.match_info["container"]
        previous = request.query.get("previous") == "true"
        lines = self.logs.get((pod, f"{container}/previous" if previous else container))
        if lines is None:
            return web.Response(status=400, text=f"container {container} of pod {pod} has no such log")
        answer = web.StreamResponse()
        await answer.prepare(request)
        sent = len(lines) - int(request.query.get("tailLines", len(lines)))
        while request.transport is not None:
            while sent < len(lines):
                await answer.write(f"{lines[sent]}\n".encode())
                sent += 1
            if request.query.get("follow") != "true":
                break
            await asyncio.sleep(0.02)
        return answer

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        pod, port = request.match_info["pod"], int(request.query["port"])
        socket = web.WebSocketResponse(protocols=[_PROTOCOL])
        await socket.prepare(request)
        self.forwarded.append(pod)
        with suppress(ConnectionError):  # the client has left
            await self._pump(socket, pod, port)
        return socket

    async def _pump(self, socket: web.WebSocketResponse, pod: str, port: int) -> None:
        for channel in (_DATA, _ERROR):
            await socket.send_bytes(channel + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection(*self.ports[pod, port])
        except (OSError, KeyError) as error:
            await socket.send_bytes(_ERROR + f"connecting to port {port}: {error!r}".encode())
            await socket.close()
            return

        async def answers() -> None:
            with suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    await socket.send_bytes(_DATA + data)
                await socket.close()

        answering = asyncio.create_task(answers())
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == _DATA:
                writer.write(message.data[1:])
                await writer.drain()
        answering.cancel()
        writer.close()
