"""What a gateway pod adds to a request, what its picker costs, and what held requests take.

Envoy and the picker are the real programs; the API server and the replicas are stand-ins of the tests, and answer at
once. All run on this machine, over loopback. Requests directly to a replica and through the gateway alternate.

    python benchmarks/gateway_overhead.py [--seconds 10] [--rate 100] [--replicas 100] [--held 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "operator", "gateway", "tests")]

from cluster.controlplane import free_ports  # noqa: E402
from fastgen.model.processor import describe_processor  # noqa: E402
from gateway.gateway_pod import GatewayPod, wait_for_ready, wait_until  # noqa: E402
from gateway.held_clients import HeldClients  # noqa: E402
from gateway.stand_ins import ApiServerStandIn, LoopThread  # noqa: E402

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 30}]}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
ROUNDS = 3
# The metrics of a replica with a step model.
VALUES = {
    "token_budget": 256, "kv_cache_capacity_tokens": 100_000,
    'step_model{coefficient="base"}': 0.01, 'step_model{coefficient="token"}': 0.0001,
}  # fmt: skip


def serve(ports: Sequence[int]) -> None:
    """Answer requests on all ports until killed."""
    metrics = _exposition()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                body = metrics if head.startswith(b"GET /metrics") else b'{"choices":[]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        for port in ports:
            await asyncio.start_server(connected, "127.0.0.1", port, backlog=1024)
        await asyncio.Event().wait()

    asyncio.run(main())


def _exposition() -> bytes:
    from fastgen_operator.autoscale.sample import SAMPLE_METRICS

    labels = {"scheduled_tokens_total": "phase"}
    lines = {
        f'{name}{{model_name="m"{f",{labels[name]}={json.dumps(label)}" if label else ""}}}': 0.0
        for name, label in SAMPLE_METRICS
    }
    for coefficient in ("base", "token", "kv_token", "context_pair"):
        lines[f'step_model{{coefficient="{coefficient}",model_name="m"}}'] = 0.0
    for name, value in VALUES.items():
        base, _, label = name.partition("{")
        lines[f'{base}{{{label[:-1] + "," if label else ""}model_name="m"}}'] = value
    return "".join(f"fastgen_{name} {value}\n" for name, value in lines.items()).encode()


async def ask(connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]], port: int) -> float:
    """Send a request on an idle connection, or a new one; return the seconds to its response."""
    reader, writer = (
        connections.get_nowait() if not connections.empty() else await asyncio.open_connection("127.0.0.1", port)
    )
    began = time.perf_counter()
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    seconds = time.perf_counter() - began
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]))
    connections.put_nowait((reader, writer))
    return seconds


async def at_rate(port: int, rate: float, seconds: float) -> list[float]:
    """Send requests at a constant rate, whatever the responses; return the seconds to each response."""
    connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    began, asked = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        asked.append(asyncio.create_task(ask(connections, port)))
    return list(await asyncio.gather(*asked))


async def at_once(port: int, clients: int, seconds: float) -> float:
    """Have clients send one request after the other; return the requests in a second."""
    end, count = time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal count
        connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        while time.perf_counter() < end:
            await ask(connections, port)
            count += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return count / seconds


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round")
    parser.add_argument("--rate", type=float, default=100.0, help="requests in a second")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--held", type=int, default=2000)
    options = parser.parse_args()
    ports = free_ports(options.replicas)
    replicas = multiprocessing.get_context("spawn").Process(target=serve, args=(ports,), daemon=True)
    replicas.start()
    thread = LoopThread()
    api = ApiServerStandIn(thread)
    with tempfile.TemporaryDirectory() as folder:
        pod = GatewayPod(Path(folder), api.url)
        pod.start()
        try:
            print(describe_processor())
            api.deployment("m")
            api.endpoints("m", *(f"127.0.0.1:{port}" for port in ports))
            wait_for_ready(pod, "m", len(ports))
            time.sleep(2)  # until each was scraped
            latency(pod, ports[0], options.rate, options.seconds)
            throughput(pod, options.seconds)
            memory(pod, api, options.held)
        finally:
            pod.stop()
            api.stop()
            replicas.kill()


def latency(pod: GatewayPod, direct: int, rate: float, seconds: float) -> None:
    """Print the time to the response, directly and through the gateway."""
    print(f"{rate:g} requests/s, ms to the response: p50, p99")
    for _ in range(ROUNDS):
        for name, port in (("direct ", direct), ("gateway", pod.ports.front)):
            found = quantiles(asyncio.run(at_rate(port, rate, seconds)), n=100)
            print(f"  {name} {1000 * found[49]:6.2f} {1000 * found[98]:6.2f}")


def throughput(pod: GatewayPod, seconds: float) -> None:
    """Print the requests in a second, and the processor time of both programs for each."""
    for clients in (8, 32):
        before = [processor_seconds(pid) for pid in pod.pids]
        rate = asyncio.run(at_once(pod.ports.front, clients, seconds))
        used = [processor_seconds(pid) - was for pid, was in zip(pod.pids, before, strict=True)]
        envoy, picker = (1000 * each / (rate * seconds) for each in used)
        times = f"processor time of each: Envoy {envoy:.2f} ms, picker {picker:.2f} ms"
        print(f"{clients} clients: {rate:.0f} requests/s; {times}")


def memory(pod: GatewayPod, api: ApiServerStandIn, number: int) -> None:
    """Print the resident memory that held requests take."""
    api.deployment("none")
    wait_for_ready(pod, "none", 0)
    before = pod.resident_bytes()
    clients = HeldClients(pod.ports.front, number, {"model": "none"})
    wait_until(lambda: pod.demand()["deployments"]["default/none"]["held"] == number, "all are held", 120)
    envoy, picker = (now - was for now, was in zip(pod.resident_bytes(), before, strict=True))
    print(f"{number} held: Envoy {envoy / number / 1024:.0f} KiB, picker {picker / number / 1024:.0f} KiB each")
    api.delete("fastgendeployments", "default", "none")
    assert clients.wait() == {404: number}


if __name__ == "__main__":
    main()
