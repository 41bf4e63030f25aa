"""OpenTelemetry traces as a collector receives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from engine.server.collector import Collector, attributes
from engine.server.serving import Serving, serving
from fastgen.server.http.request_context import Outcome
from fastgen.server.http.tracing import Tracer, is_configured
from fastgen.settings import ConfigError
from fastgen.text.request_output import Usage
from support.waiting import wait_until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Traced:
    server: Serving
    collector: Collector


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "chat-in-test"}
    options = ("--served-model-name", "smollm2", "other-name")
    with closing(Collector()) as collector:
        named = ("--otlp-endpoint", collector.url)
        with serving(tmp_path_factory.mktemp("traced"), *options, *named, environment=environment) as server:
            server.wait_status("/ready", 200)
            yield Traced(server, collector)


def span_of(traced: Traced, request_id: str) -> tuple[Span, list[Span]]:
    """Return the span of a request and its children."""

    def found() -> list[Span]:
        return [s for s in traced.collector.spans if attributes(s.attributes).get("fastgen.request_id") == request_id]

    wait_until(found, f"the span of {request_id}")
    (span,) = found()
    children = sorted(
        (each for each in traced.collector.spans if each.parent_span_id == span.span_id),
        key=lambda each: each.start_time_unix_nano,
    )
    return span, children


def test_a_generation_is_a_child_span_of_its_caller(traced: Traced) -> None:
    headers = {"X-Request-Id": "traced-1", "traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"model": "other-name", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 5, "stream": True}
    streamed = traced.server.request("POST", "/v1/chat/completions", json=body, headers=headers)
    assert streamed.text.endswith("data: [DONE]\n\n")
    span, children = span_of(traced, "traced-1")
    assert (span.name, span.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    span_attributes = attributes(span.attributes)
    assert span_attributes["http.response.status_code"] == 200
    assert span_attributes["gen_ai.operation.name"] == "chat"
    assert span_attributes["gen_ai.request.model"] == "other-name"
    assert span_attributes["gen_ai.response.id"].startswith("chatcmpl-")
    assert span_attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span_attributes["gen_ai.usage.output_tokens"] == 5
    assert span_attributes["gen_ai.usage.input_tokens"] > 2
    assert 0 < span_attributes["gen_ai.latency.time_to_first_token"] <= span_attributes["gen_ai.latency.e2e"]
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert [child.end_time_unix_nano for child in children[:2]] == [c.start_time_unix_nano for c in children[1:]]
    assert 0 <= span_attributes["gen_ai.latency.time_in_queue"] <= span_attributes["gen_ai.latency.time_to_first_token"]
    for child in children:
        assert span.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= span.end_time_unix_nano
    assert traced.collector.service_names == {"chat-in-test"}


@pytest.mark.parametrize(
    ("path", "field", "operation"),
    [("/v1/completions", "prompt", "text_completion"), ("/v1/responses", "input", "chat")],
)
def test_each_endpoint_names_its_operation(path: str, field: str, operation: str, traced: Traced) -> None:
    request_id = f"traced-{operation}"
    traced.server.request("POST", path, json={field: "a"}, headers={"X-Request-Id": request_id})
    span, children = span_of(traced, request_id)
    assert (span.name, attributes(span.attributes)["gen_ai.operation.name"]) == (f"POST {path}", operation)
    assert [child.name for child in children] == ["queue", "prefill", "decode"]


@pytest.mark.parametrize(
    ("queued", "first_token", "phases"),
    [
        (1.0, 2.0, [("queue", 100, 101), ("prefill", 101, 102), ("decode", 102, 105)]),
        (1.0, None, [("queue", 100, 101), ("prefill", 101, 105)]),
        (None, None, [("queue", 100, 105)]),
    ],
    ids=["generated", "aborted in its prefill", "never scheduled"],
)
def test_a_request_ends_in_the_phase_that_it_has_reached(
    queued: float | None, first_token: float | None, phases: list[tuple[str, float, float]]
) -> None:
    outcome = Outcome(
        response_id="cmpl-1",
        usage=Usage(1, 1),
        finish_reasons=("none",),
        arrival=100.0,
        queue_seconds=queued,
        first_token_seconds=first_token,
        total_seconds=5.0,
    )
    assert outcome.phases() == phases


def test_a_rejected_request_is_a_span_in_its_own_trace(traced: Traced) -> None:
    response = traced.server.request("POST", "/v1/completions", json={}, headers={"X-Request-Id": "traced-2"})
    assert response.status_code == 400
    span, children = span_of(traced, "traced-2")
    assert not span.parent_span_id
    assert attributes(span.attributes)["http.response.status_code"] == 400
    assert children == []


def test_probes_are_not_traced(traced: Traced) -> None:
    for path in ("/health", "/ready", "/metrics"):
        traced.server.get(path, headers={"X-Request-Id": "traced-probe"})
    traced.server.get("/version", headers={"X-Request-Id": "traced-3"})
    span, _ = span_of(traced, "traced-3")
    assert span.name == "GET"
    requests = [attributes(each.attributes).get("fastgen.request_id") for each in traced.collector.spans]
    assert "traced-probe" not in requests


def test_opentelemetry_is_not_loaded_without_an_endpoint(scripted: Serving) -> None:
    loaded = Path(f"/proc/{scripted.process.pid}/maps").read_text()
    assert "google/_upb" not in loaded  # the protobuf library, which the exporter needs
    assert scripted.status("/version") == 200


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        (None, {}, False),
        ("http://c:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_traces_are_off_unless_an_endpoint_is_configured(
    endpoint: str | None, environment: dict[str, str], wanted: bool
) -> None:
    assert is_configured(endpoint, environment) is wanted


def test_an_endpoint_that_is_not_a_url_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match="--otlp-endpoint collector:4318: not an HTTP URL; give one like http://collector:4318"
    ):
        Tracer("collector:4318")
