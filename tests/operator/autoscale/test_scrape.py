"""Parsing of scraped metrics, and engines that return invalid values, hang or flood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit

import pytest

from fastgen.core.request import FinishReason
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.engine.messages import EngineInfo, StepReport
from fastgen.server.serving.metrics import Metrics
from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.autoscale.scrape import Scraper, Target, UnusableError, parse_sample

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def exposed(model: str = "chat") -> str:
    """Return the metrics of a real engine server after some requests."""
    metrics = Metrics(model)
    info = EngineInfo(
        architecture="llama",
        device="cpu",
        dtype="float32",
        vocabulary_size=100,
        hidden_size=8,
        num_parameters=1000,
        max_model_length=2048,
        token_budget=256,
        max_sequences=256,
        block_size=64,
        num_blocks=100,
        load_seconds=1.0,
    )
    metrics.describe(info, "test")
    step = StepStats(
        step_seconds=0.1,
        prefill_tokens=200,
        decode_tokens=3,
        prefix_cache_query_tokens=64,
        prefix_cache_hit_tokens=32,
    )
    scheduler = SchedulerStats(
        num_running=3,
        num_waiting=2,
        kv_tokens=900,
        kv_blocks_used=25,
        backlog_prompt_tokens=1200,
        oldest_waiting_seconds=0.5,
    )
    metrics.record(StepReport([], step, scheduler, (0.02, 0.0005, 1e-6)))
    metrics.admitted([1000, 800])
    metrics.rejected(1)
    metrics.finished(FinishReason.STOP, 2.0, 500, 40)
    metrics.finished(FinishReason.ABORT, 2.0, 70, 0)
    metrics.count_rejected("invalid_value")
    body, _ = metrics.expose("text/plain", 1)
    return body.decode()


def test_every_field_is_read_from_a_real_engines_exposition() -> None:
    assert parse_sample(exposed(), "chat", 7.0) == Sample(
        time=7.0,
        prefill_tokens=200,
        decode_tokens=3,
        cached_tokens=32,
        arrived_tokens=2700,
        rejected_tokens=900,
        cancelled_tokens=70,
        ended_requests=2,
        ended_prompt_tokens=570,
        ended_generated_tokens=40,
        backlog_tokens=1200,
        running=3,
        waiting=2,
        kv_used=0.25,
        kv_capacity_tokens=6400,
        kv_tokens=900,
        token_budget=256,
        step_model=(0.02, 0.0005, 1e-6),
    )


BACKLOG, USAGE = 'backlog_prompt_tokens{model_name="chat"} ', 'usage_ratio{model_name="chat"} '


def altered(was: str, becomes: str) -> str:
    honest = exposed()
    assert was in honest
    return honest.replace(was, becomes)


LIES = [
    ("another model", exposed("other"), "OtherModel"),
    ("not a number", altered(BACKLOG + "1200.0", BACKLOG + "NaN"), "BadValue"),
    ("negative", altered(BACKLOG + "1200.0", BACKLOG + "-1200.0"), "BadValue"),
    ("1e300", altered(BACKLOG + "1200.0", BACKLOG + "1e300"), "BadValue"),
    ("infinite", altered(BACKLOG + "1200.0", BACKLOG + "+Inf"), "BadValue"),
    ("more than all of the cache", altered(USAGE + "0.25", USAGE + "7"), "BadValue"),
    ("no backlog", altered("fastgen_backlog_prompt_tokens{", "fastgen_backlog{"), "Incomplete"),
    ("half a line", altered(BACKLOG + "1200.0", BACKLOG), "NotMetrics"),
    ("a timestamp", altered(BACKLOG + "1200.0", BACKLOG + "1200.0 1767225600000"), "NotMetrics"),
    ("half a label", altered(BACKLOG, 'backlog_prompt_tokens{model_name="chat '), "NotMetrics"),
    ("a web page", "<html><body>welcome</body></html>", "NotMetrics"),
    ("nothing", "", "NotMetrics"),
    ("another program", 'python_info{version="3"} 1.0\n', "NotMetrics"),
]


@pytest.mark.parametrize(("text", "reason"), [case[1:] for case in LIES], ids=[case[0] for case in LIES])
def test_an_invalid_response_is_unusable(text: str, reason: str) -> None:
    with pytest.raises(UnusableError) as caught:
        parse_sample(text, "chat", 0.0)
    assert caught.value.reason == reason


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Yield the URL of a test server."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        server.close()


def answering(head: str, body: bytes) -> Handler:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    return answer


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    try:
        while True:
            writer.write(b"fastgen_nonsense 1\n" * 10_000)
            await writer.drain()
    except ConnectionError:
        pass


async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    try:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        pass


HOSTILE = [
    ("hangs", hang, "TimedOut"),
    ("trickles", trickle, "TimedOut"),
    ("floods", flood, "TooLarge"),
    ("refuses", answering("503 Service Unavailable", b""), "BadStatus"),
    ("sends elsewhere", answering("302 Found\r\nLocation: http://127.0.0.1:1/", b""), "BadStatus"),
    ("is not HTTP", answering("nonsense", b""), "Unreachable"),
]


@pytest.mark.parametrize(("handler", "reason"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
async def test_a_misbehaving_engine_costs_at_most_its_deadline(handler: Handler, reason: str) -> None:
    async with serving(handler) as bad, serving(answering("200 OK", exposed().encode())) as good:
        began = time.monotonic()
        async with Scraper(0.5) as scraper:
            found = await scraper.scrape([Target("bad", bad, "chat"), Target("good", good, "chat")])
        assert time.monotonic() - began < 3
    answers = {target.pod: answer for target, answer in found.items()}
    assert isinstance(answers["good"], Sample), "one bad engine spoils the others' answers"
    assert isinstance(answers["bad"], UnusableError)
    assert answers["bad"].reason == reason


async def test_a_closed_port_is_unreachable() -> None:
    async with serving(hang) as address:
        pass
    async with Scraper(0.5) as scraper:
        (answer,) = (await scraper.scrape([Target("gone", address, "chat")])).values()
    assert isinstance(answer, UnusableError)
    assert answer.reason == "Unreachable"


async def test_concurrent_scrapes_are_limited() -> None:
    at_once, most = 0, 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        await answering("200 OK", exposed().encode())(reader, writer)
        at_once -= 1

    async with serving(count) as address:
        targets = [Target(f"pod-{n}", address, "chat") for n in range(20)]
        async with Scraper(5.0, concurrency=4) as scraper:
            found = await scraper.scrape(targets)
    assert len(found) == 20
    assert all(isinstance(answer, Sample) for answer in found.values())
    assert most <= 4


class Keeping:
    """An engine that answers several requests on a connection, and closes it after `requests`."""

    def __init__(self, requests: int) -> None:
        self.requests, self.connections = requests, 0
        self.paths: set[bytes] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        body = exposed().encode()
        with suppress(asyncio.IncompleteReadError):
            for _ in range(self.requests):
                self.paths.add((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize(("requests", "connections"), [(100, 1), (2, 3)], ids=["kept", "closed by the engine"])
async def test_connections_are_kept_between_scrapes_and_replaced_when_closed(requests: int, connections: int) -> None:
    engine = Keeping(requests)
    async with serving(engine) as address, Scraper(5.0) as scraper:
        for _ in range(6):
            (answer,) = (await scraper.scrape([Target("pod", address, "chat")])).values()
            assert isinstance(answer, Sample), answer
    assert engine.connections == connections


async def test_only_the_samples_that_are_read_are_asked_for() -> None:
    engine = Keeping(1)
    async with serving(engine) as address, Scraper(5.0) as scraper:
        await scraper.scrape([Target("pod", address, "chat")])
    (path,) = engine.paths
    names = parse_qs(urlsplit(path.decode()).query)["name[]"]
    metrics = Metrics("chat")
    metrics.record(StepReport([], StepStats(), SchedulerStats(), (0.02, 0.0005, 1e-6)))
    body, _ = metrics.expose("text/plain", 1, names)
    assert parse_sample(body.decode(), "chat", 0.0).step_model == (0.02, 0.0005, 1e-6)
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert len(lines) == len(names) + 3, "two phases of scheduled tokens, three coefficients"
