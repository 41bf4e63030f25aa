"""Metrics of engines, as the plugin reads them."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, BinaryIO

import pytest

from fastgen.api_client.metrics import Scrape
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin import engine_metrics
from fastgen_operator.plugin.cluster import PluginError
from fastgen_operator.plugin.engine_metrics import MetricsReader


@pytest.fixture(autouse=True)
def _a_busy_machine_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "_SECONDS", 60.0)


class PlayedCluster:
    """A cluster whose port-forwards all lead to one local port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def connection(self, *_pod: object) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)


METRICS = b'fastgen_token_budget{model_name="m"} 512\n'


@contextmanager
def reading(send: Callable[[BinaryIO], None], length: int | None = None) -> Iterator[Callable[[str], Any]]:
    """Serve responses that `send` writes, and yield a function that reads the metrics of a pod by its name.

    Each response announces its `length`, if given, and ends its connection.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            with suppress(OSError):
                send(self.wfile)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        cluster: Any = PlayedCluster(server.server_port)
        reader = MetricsReader(cluster)
        yield lambda name: reader.read([Pod({"metadata": {"name": name, "namespace": "space"}})])[name]
        server.shutdown()


def test_a_pod_without_prometheus_text_is_named_and_the_others_are_read() -> None:
    bodies = iter([b"<html>", METRICS])
    with reading(lambda file: file.writelines([next(bodies)])) as read:
        failed, scrape = read("a"), read("b")
    assert isinstance(failed, PluginError)
    assert str(failed) == "GET /metrics: the response is not in Prometheus' text format"
    assert isinstance(scrape, Scrape)
    assert scrape.value("token_budget") == 512


def drip(file: BinaryIO) -> None:
    while True:
        file.write(b"x\n")
        file.flush()
        time.sleep(0.02)


def flood(file: BinaryIO) -> None:
    while True:
        file.write(b"x\n" * 10_000)


def long_line(file: BinaryIO) -> None:
    labels = ",".join(f'l{number}="x"' for number in range(90_000))
    file.write(f"fastgen_token_budget{{{labels}}} 512\n".encode())


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (drip, "no response within 0.5 s"),
        (flood, "the response has more than 1 MiB"),
        (long_line, "a line has more than 2048 characters"),
    ],
)
def test_a_pod_that_sends_without_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, send: Callable[[BinaryIO], None], message: str
) -> None:
    if send is drip:
        monkeypatch.setattr(engine_metrics, "_SECONDS", 0.5)
    with reading(send) as read:
        assert str(read("a")) == f"GET /metrics: {message}"


def test_metrics_that_are_cut_short_are_not_read() -> None:
    with reading(lambda file: file.writelines([METRICS]), len(METRICS) + 10) as read:
        failed = read("a")
    assert isinstance(failed, PluginError)
    assert f"{len(METRICS)} bytes read, 10 more expected" in str(failed)


def test_a_connection_that_a_pod_has_ended_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lead to the same port of the user's own machine."""
    num_forwards, connection = 0, PlayedCluster.connection

    def counting(self: PlayedCluster, *pod: object) -> http.client.HTTPConnection:
        nonlocal num_forwards
        num_forwards += 1
        return connection(self, *pod)

    monkeypatch.setattr(PlayedCluster, "connection", counting)
    with reading(lambda file: file.writelines([METRICS]), len(METRICS)) as read:
        assert [read("a").value("token_budget") for _ in range(3)] == [512, 512, 512]
    assert num_forwards == 3
