"""The gateway in front of engines: the real server, with the scripted engine or the real one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from engine.server.serving import REAL, Serving, serving
from gateway.gateway_pod import GatewayPod, wait_for_ready
from gateway.stand_ins import ApiServerStandIn
from support.waiting import PATIENCE, wait_until


def expose(api: ApiServerStandIn, pod: GatewayPod, *engines: Serving) -> None:
    api.deployment("chat", model="smollm2")
    api.endpoints("chat", *(f"127.0.0.1:{engine.port}" for engine in engines))
    wait_for_ready(pod, "chat", len(engines))


def client(pod: GatewayPod) -> OpenAI:
    return OpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE * 120)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Serving, Serving]]:
    """Two servers with scripted engines, with steps of 20 ms."""
    options, environment = ("--served-model-name", "smollm2"), {"SCRIPT_STEP_SECONDS": "0.02"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "a", *options, environment=environment) as a,
        serving(tmp_path / "b", *options, environment=environment) as b,
    ):
        for server in (a, b):
            server.wait_status("/ready", 200)
        yield a, b


def test_engines_metrics_are_scraped_and_requests_shared(
    pod: GatewayPod, api: ApiServerStandIn, engines: tuple[Serving, Serving]
) -> None:
    expose(api, pod, *engines)
    done = [
        client(pod).completions.create(model="smollm2", prompt=f"{number} go on", max_tokens=3) for number in range(12)
    ]
    assert all(each.choices[0].text for each in done)

    def served() -> list[float]:
        return [engine.metric("fastgen_request_success_total", finish_reason="length") for engine in engines]

    wait_until(lambda: sum(served()) == 12, "all are counted")
    assert min(served()) > 0
    failures = {reason for _, _, reason in pod.values("fastgen_gateway_scrape_failures_total")}
    assert failures <= {"TimedOut"}, "on a busy machine, an engine may take longer"


def test_a_model_is_found_by_its_namespace_and_name(
    pod: GatewayPod, api: ApiServerStandIn, engines: tuple[Serving, Serving]
) -> None:
    expose(api, pod, engines[0])
    for model in ("smollm2", "default/chat"):
        done = client(pod).completions.create(model=model, prompt="go on", max_tokens=2)
        assert done.model == "smollm2"


def test_no_request_fails_while_an_engine_drains(
    pod: GatewayPod, api: ApiServerStandIn, engines: tuple[Serving, Serving]
) -> None:
    """The API server does not tell of the drain: the engine's responses do."""
    a, b = engines
    expose(api, pod, a, b)
    asker, errors, ended = client(pod), list[Exception](), threading.Event()
    counts = [0]

    def ask() -> None:
        while not ended.is_set():
            try:
                asker.completions.create(model="smollm2", prompt="go on", max_tokens=4)
                counts[0] += 1
            except Exception as error:
                errors.append(error)

    long = client(pod).completions.create(model="smollm2", prompt="go on", max_tokens=120, stream=True)
    next(iter(long))
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: counts[0] > 20, "requests are answered")
    a.signal(signal.SIGTERM)
    assert a.wait_exit() == 0
    before = counts[0]
    wait_until(lambda: counts[0] > before + 20, "the other engine answers")
    ended.set()
    for thread in threads:
        thread.join(PATIENCE * 60)
    assert errors == []
    assert [chunk.choices[0].finish_reason for chunk in long][-1] == "length"


@pytest.mark.slow
def test_a_real_model_answers_through_the_gateway_once_it_is_ready(
    pod: GatewayPod, api: ApiServerStandIn, tmp_path: Path
) -> None:
    """The deployment begins with no replica, and the request waits while the model is loaded."""
    api.deployment("chat", model="smollm2")
    wait_for_ready(pod, "chat", 0)
    texts: list[str] = []

    def ask() -> None:
        stream = client(pod).chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of Germany?"}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: pod.demand()["deployments"]["default/chat"]["held"] == 1, "the request is held")
    options = ("--served-model-name", "smollm2", "--max-model-length", "2048", "--kv-cache-memory", "256MiB")
    with serving(tmp_path, *options, command=REAL) as server:
        server.wait_status("/ready", 200, seconds=240)
        api.endpoints("chat", f"127.0.0.1:{server.port}")
        asking.join(PATIENCE * 120)
        assert texts == ["The capital of Germany is Berlin."]
