"""Metrics of engines, as the plugin reads them."""

from __future__ import annotations

import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from fastgen.api_client.metrics import Scrape
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import PluginError
from fastgen_operator.plugin.engine_metrics import MetricsReader


class PlayedCluster:
    """A cluster whose port-forwards all lead to one local port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def connection(self, *_pod: object) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)


def test_a_pod_without_prometheus_text_is_named_and_the_others_are_read() -> None:
    bodies = iter([b"<html>", b'fastgen_token_budget{model_name="m"} 512\n'])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(bodies))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        cluster: Any = PlayedCluster(server.server_port)
        reader = MetricsReader(cluster)
        (failed,), (scrape,) = (
            reader.read([Pod({"metadata": {"name": name, "namespace": "space"}})]).values() for name in "ab"
        )
        server.shutdown()
    assert isinstance(failed, PluginError)
    assert str(failed) == "GET /metrics: the response is not in Prometheus' text format"
    assert isinstance(scrape, Scrape)
    assert scrape.value("token_budget") == 512
