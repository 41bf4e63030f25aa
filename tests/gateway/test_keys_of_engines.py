"""Clients of the gateway in front of a real server that has a key of its own, with the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI, RateLimitError

from engine.server.serving import Serving, serving
from gateway.gateway_pod import GatewayPod, client_options, wait_for_ready
from gateway.stand_ins import ApiServerStandIn
from support.waiting import PATIENCE, wait_until

LONG = "words of a prompt that is long enough for several blocks of the cache " * 30


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Serving]:
    """A server that asks for its own key."""
    (tmp_path / "engine").mkdir()
    keys = tmp_path / "engine" / "keys"
    keys.write_text("engine-key\nkey-of-its-owner\n")
    options = ("--served-model-name", "smollm2", "--api-key-file", str(keys))
    with serving(tmp_path / "engine", *options) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture
def keyed(_api: ApiServerStandIn, api: ApiServerStandIn, engine: Serving, tmp_path: Path) -> Iterator[GatewayPod]:
    """A gateway with the clients `team`, `other` and `limited`, in front of the engine."""
    keys = {name: f"key-of-{name}" for name in ("team", "other", "limited")}
    limits = {"clients": {"limited": {"tokensPerMinute": 200}}}
    options = client_options(tmp_path, keys, limits, {"default.chat": "engine-key"})
    started = GatewayPod(tmp_path, _api.url, options)
    started.start()
    api.deployment("chat", model="smollm2")
    api.endpoints("chat", f"127.0.0.1:{engine.port}")
    wait_for_ready(started, "chat", 1)
    yield started
    started.stop()


def client(pod: GatewayPod, name: str) -> OpenAI:
    return OpenAI(base_url=f"{pod.url}/v1", api_key=f"key-of-{name}", max_retries=0, timeout=PATIENCE * 120)


def used(pod: GatewayPod, name: str) -> tuple[float, float]:
    """Return the tokens of the prompts and outputs of a client."""
    found = pod.values("fastgen_gateway_client_tokens_total")
    return found.get((name, "prompt"), 0.0), found.get((name, "completion"), 0.0)


def test_each_kind_of_response_is_counted_by_its_usage(keyed: GatewayPod, engine: Serving) -> None:
    assert engine.post("/v1/completions", {"model": "smollm2", "prompt": "go"}).status_code == 401
    asker = client(keyed, "team")
    messages = [{"role": "user", "content": "go on"}]
    prompt = completion = 0
    for number, ask in enumerate(
        (
            lambda: asker.completions.create(model="smollm2", prompt="go on", max_tokens=5),
            lambda: asker.chat.completions.create(model="smollm2", messages=messages, max_tokens=6),
            lambda: asker.responses.create(model="smollm2", input="go on", max_output_tokens=7),
            lambda: last_usage(
                asker.chat.completions.create(
                    model="smollm2",
                    messages=messages,
                    max_tokens=8,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ),
            lambda: next(
                event.response
                for event in asker.responses.create(model="smollm2", input="go on", max_output_tokens=9, stream=True)
                if event.type in ("response.completed", "response.incomplete")
            ),
        )
    ):
        usage = ask().usage
        tokens = (usage.prompt_tokens, usage.completion_tokens) if number in (0, 1, 3) else None
        tokens = tokens or (usage.input_tokens, usage.output_tokens)
        prompt, completion = prompt + tokens[0], completion + tokens[1]
        expected = (float(prompt), float(completion))
        wait_until(
            lambda expected=expected: used(keyed, "team") == expected, f"request {number} is counted: {expected}"
        )


def last_usage(stream):  # type: ignore[no-untyped-def]
    """Return the chunk of a stream that has the usage."""
    return [chunk for chunk in stream if chunk.usage is not None][-1]


def test_clients_share_no_cached_prefix_of_the_engine(keyed: GatewayPod) -> None:
    def cached(name: str) -> int:
        done = client(keyed, name).completions.create(model="smollm2", prompt=LONG, max_tokens=1)
        assert done.usage is not None
        details = done.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    assert cached("team") == 0
    assert cached("team") > 0
    assert cached("other") == 0
    assert cached("other") > 0


def test_the_official_client_understands_the_errors(keyed: GatewayPod) -> None:
    with pytest.raises(AuthenticationError, match="the API key is not valid: send Authorization: Bearer KEY"):
        client(keyed, "nobody").models.list()
    asker = client(keyed, "limited")
    asker.completions.create(model="smollm2", prompt=LONG, max_tokens=4)

    errors: list[RateLimitError] = []

    def is_limited() -> bool:
        try:
            asker.completions.create(model="smollm2", prompt="go on", max_tokens=4)
        except RateLimitError as error:
            errors.append(error)
        return bool(errors)

    wait_until(is_limited, "the limit is reached")
    assert errors[0].code == "tokens_per_minute_exceeded"
    assert int(errors[0].response.headers["retry-after"]) > 0
