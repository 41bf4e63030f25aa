"""A gateway pod that ends: running requests finish, held ones are refused, and connections close."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from gateway.gateway_pod import GatewayPod, expose
from gateway.held_clients import HeldClients
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import wait_until


def test_a_pod_that_drains_finishes_what_runs(
    api: ApiServerStandIn, replicas: tuple[ReplicaStandIn, ReplicaStandIn], tmp_path: Path
) -> None:
    pod = GatewayPod(tmp_path, api.url)
    pod.start()
    try:
        expose(api, pod, "m", replicas[0])
        expose(api, pod, "none")
        body = {"model": "m", "events": 20, "gap": 1.0}
        with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, timeout=60) as response:
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
            assert list(lines)[-2:] == ["data: [DONE]", ""]
            draining.join(60)
            assert left == [0], "the drain lasts as long as the stream"
    finally:
        pod.stop()
