"""OpenTelemetry tracing: a span per API request with a child span per phase, if an OTLP endpoint is configured.

Names follow OpenTelemetry's semantic conventions for HTTP and generative AI. These have no attributes for latencies, so
those use vLLM's names. OpenTelemetry is not imported unless an endpoint is configured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.server.http.auth import OPEN_PATHS
from fastgen.server.http.request_context import Outcome, RequestContext, current
from fastgen.settings import ConfigError
from fastgen.version import VERSION

_ENVIRONMENT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}


def is_configured(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Return whether tracing is on. OTEL_SDK_DISABLED overrides the endpoint, as OpenTelemetry specifies."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(endpoint) or any(environment.get(name) for name in _ENVIRONMENT_VARIABLES)


class Tracer:
    """Exports spans to an OTLP collector over HTTP, in batches, from a background thread.

    Args:
        endpoint: base URL of the collector; by default the exporter reads it from the environment. The environment
            also sets the service name, headers and the sampler.

    Raises:
        ConfigError: if `endpoint` is not an HTTP URL.
    """

    def __init__(self, endpoint: str | None) -> None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint {endpoint}: not an HTTP URL; give one like http://collector:4318")
        # By name, because mypy is configured not to follow the opentelemetry namespace package.
        self._trace = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        resources = import_module("opentelemetry.sdk.resources")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
        batches = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor
        context = import_module("opentelemetry.trace.propagation.tracecontext")

        service = resources.Resource({"service.name": "fastgen", "service.version": VERSION})
        service = service.merge(resources.OTELResourceDetector().detect())
        self._provider = sdk.TracerProvider(resource=service, shutdown_on_exit=False)
        address = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(batches(exporter(endpoint=address)))
        self._tracer = self._provider.get_tracer("fastgen", VERSION)
        self._propagator = context.TraceContextTextMapPropagator()

    def start_span(self, scope: Scope) -> Any:
        """Start a span for this request, as a child of the span named in the headers, if any."""
        path, method = scope["path"], scope["method"]
        return self._tracer.start_span(
            # Span names must have low cardinality, so unknown paths are left out.
            f"{method} {path}" if path in _OPERATIONS else method,
            context=self._propagator.extract(dict(Headers(scope=scope))),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path, "fastgen.request_id": current().id},
        )

    def describe(self, span: Any, path: str, context: RequestContext) -> None:
        """Set a span's attributes from the outcome of its request and add a child span per phase."""
        outcome = context.outcome
        if context.model is not None:
            span.set_attributes({"gen_ai.request.model": context.model, "gen_ai.provider.name": "fastgen"})
        if path in _OPERATIONS:
            span.set_attribute("gen_ai.operation.name", _OPERATIONS[path])
        if outcome is None:
            return
        span.set_attributes(_attributes(outcome))
        # The outcome's times are from the monotonic clock.
        to_wall = time.time_ns() - time.monotonic_ns()
        parent = self._trace.set_span_in_context(span)
        for name, start, end in outcome.phases():
            child = self._tracer.start_span(name, parent, start_time=round(start * 1e9) + to_wall)
            child.end(round(end * 1e9) + to_wall)

    def fail(self, span: Any) -> None:
        """Mark a span as failed."""
        span.set_status(self._trace.StatusCode.ERROR)

    async def close(self) -> None:
        """Export the remaining spans and stop."""
        await asyncio.to_thread(self._provider.shutdown)


class Traces:
    """Middleware that creates a span for each API request."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_span(scope)

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    self._tracer.fail(span)
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            self._tracer.describe(span, scope["path"], current())
            span.end()


def _attributes(outcome: Outcome) -> dict[str, Any]:
    latencies = {
        "gen_ai.latency.time_in_queue": outcome.queue_seconds,
        "gen_ai.latency.time_to_first_token": outcome.first_token_seconds,
        "gen_ai.latency.e2e": outcome.total_seconds,
    }
    return {
        "gen_ai.response.id": outcome.response_id,
        "gen_ai.response.finish_reasons": outcome.finish_reasons,
        "gen_ai.usage.input_tokens": outcome.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
        **{name: seconds for name, seconds in latencies.items() if seconds is not None},
    }
