"""Write the gateway's picture of docs/monitoring.md: `PYTHONPATH=tests:charts python -m dashboards.gateway_picture`.

The real Envoy and the picker run in front of replicas that only answer: one model has two of them, of which one drains
in between, and another one wakes from zero. Two clients send requests, and one of them exceeds its limit.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from dashboards.files import rendered
from dashboards.picture import Span
from dashboards.pictures import write_picture
from gateway.gateway_pod import GatewayPod, client_options, expose  # type: ignore[import-not-found]
from gateway.stand_ins import ApiServerStandIn, LoopThread, ReplicaStandIn  # type: ignore[import-not-found]
from harness.monitored_fleet import runner
from harness.prometheus import Target, prometheus

_STEP: Final = 2
_RATE_SECONDS: Final = 12
# Seconds from the start.
_ASKED_AT, _WOKEN_AT, _DRAINS_AT, _DRAINED_AT, _ENDS_AT = 20, 45, 60, 85, 110
_LIMITS: Final = {"clients": {"notebooks": {"tokensPerMinute": 30_000}}}


def write_gateway_picture() -> None:
    """Run the scenario and write the picture."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loop = LoopThread()
        stack.callback(loop.close)
        api, one, two = ApiServerStandIn(loop), ReplicaStandIn(loop, "one"), ReplicaStandIn(loop, "two")
        for server in (api, one, two):
            stack.callback(server.stop)
        keys = {client: f"key of {client}" for client in ("search", "notebooks")}
        pod = GatewayPod(folder, api.url, client_options(folder, keys, _LIMITS))
        pod.start()
        stack.callback(pod.stop)
        expose(api, pod, "chat", one, two)
        api.deployment("night")
        source = stack.enter_context(prometheus(folder, seconds=_STEP))
        source.scrape([Target(f"127.0.0.1:{pod.http_port}", {"pod": "fastgen-gateway-7d9f"}, honour=True)])
        begun = time.time()
        with _clients(pod, begun):
            _sleep_until(begun + _WOKEN_AT)
            api.endpoints("night", two.address)
            _sleep_until(begun + _DRAINS_AT)
            one.mode = "draining"
            _sleep_until(begun + _DRAINED_AT)
            one.mode = "serve"
            _sleep_until(begun + _ENDS_AT)
        span = Span(begun + _STEP, time.time() - _STEP, _STEP)
        run = runner(source, {"pod": ".*", "__rate_interval": f"{_RATE_SECONDS}s"}, span)
        write_picture("fastgen-gateway.json", rendered()["fastgen-gateway.json"], run, span)


@contextmanager
def _clients(pod: GatewayPod, begun: float) -> Iterator[None]:
    ends = threading.Event()
    threads = [threading.Thread(target=_send, args=(pod, number, begun, ends)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def _send(pod: GatewayPod, number: int, begun: float, ends: threading.Event) -> None:
    chooser = random.Random(number)
    client = "search" if number < 5 else "notebooks"
    with httpx.Client(timeout=120, headers={"authorization": f"Bearer key of {client}"}) as connection:
        while not ends.wait(chooser.uniform(0.1, 0.5)):
            model = "night" if number % 4 == 0 and time.time() - begun > _ASKED_AT else "chat"
            usage = [chooser.randint(50, 600), chooser.randint(10, 200)]
            body = {"model": model, "prompt": "x" * 4 * usage[0], "seconds": chooser.uniform(0.2, 1.5), "usage": usage}
            with suppress(httpx.TransportError):
                connection.post(f"{pod.url}/v1/completions", json=body)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


if __name__ == "__main__":
    write_gateway_picture()
