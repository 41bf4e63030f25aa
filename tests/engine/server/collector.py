"""A minimal OTLP collector that keeps the spans it receives over HTTP."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Listens on a free port until closed."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.service_names: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            named = attributes(resource.resource.attributes)
            self.service_names.add(named["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(pairs: Any) -> dict[str, Any]:
    """Return OTLP key-value pairs as a dictionary."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in pairs}


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
