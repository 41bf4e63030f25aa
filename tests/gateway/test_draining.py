"""A gateway pod that ends: running requests finish, held ones are refused, and connections close."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from cluster.controlplane import free_ports
from fastgen_gateway import envoy_admin
from gateway.gateway_pod import CLIENT_SECONDS, GatewayPod, expose
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import PATIENCE, wait_until


def test_a_pod_that_drains_finishes_what_runs(
    api: ApiServerStandIn, replicas: tuple[ReplicaStandIn, ReplicaStandIn], tmp_path: Path
) -> None:
    pod = GatewayPod(tmp_path, api.url)
    pod.start()
    try:
        expose(api, pod, "m", replicas[0])
        expose(api, pod, "none")
        replicas[0].permit()
        body = {"model": "m", "events": 2, "gated": True}
        with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=CLIENT_SECONDS) as response:
            lines = response.iter_lines()
            next(lines)
            held = HeldClients(pod.ports.front, 2, {"model": "none"})
            wait_until(lambda: pod.demand()["deployments"]["default/none"]["held"] == 2, "requests are held")
            left: list[int] = []

            def drain() -> None:
                pod.drain()
                left.append(replicas[0].num_running)

            draining = threading.Thread(target=drain)
            draining.start()
            assert held.wait() == {503: 2}
            assert all(b"gateway_draining" in each for each in held.bodies)
            wait_until(lambda: pod.status(pod.ports.status, "/ready") == 503, "Envoy is not ready")
            late = pod.ask("m")
            assert late.status_code == 200
            assert late.headers["connection"] == "close"
            draining.join(envoy_admin._LEAST_SECONDS + 2)
            assert draining.is_alive(), "the drain lasts as long as the stream"
            replicas[0].permit()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
            draining.join(PATIENCE * 60)
            assert left == [0]
    finally:
        pod.stop()


@pytest.mark.parametrize("listener", ["front", "pools"])
async def test_a_drain_waits_for_an_envoy_that_answers_late(monkeypatch: pytest.MonkeyPatch, listener: str) -> None:
    """A slow answer must not end the drain: it would cut the streams of a pod on a busy node."""
    for name, value in (("_LEAST_SECONDS", 0.0), ("_POLL_SECONDS", 0.01), ("_TIMEOUT", aiohttp.ClientTimeout(total=1))):
        monkeypatch.setattr(envoy_admin, name, value)
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        asked[request.path] += 1
        if asked[request.path] == 1:
            await asyncio.sleep(3600)
        value = int(asked[request.path] < 4)
        name = f"http.{listener}.downstream_rq_active"
        stats = [{"name": name, "value": value}] if re.search(request.query.get("filter", ""), name) else []
        return web.json_response({"stats": stats})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await envoy_admin.drain_envoy(port)
    finally:
        await runner.cleanup()
    assert asked.keys() == {"/healthcheck/fail", "/drain_listeners", "/stats"}
    assert min(asked["/healthcheck/fail"], asked["/drain_listeners"]) >= 2
    assert asked["/stats"] >= 4
