"""Parsing of scraped metrics, and engines that return invalid values, hang or flood."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fastgen.core.request import FinishReason
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_times import StepCoefficients
from fastgen.link.messages import EngineInfo, StepReport
from fastgen.server.http.server import KEEP_ALIVE_SECONDS
from fastgen.server.openai.response_bodies import json_response
from fastgen.server.probes import LoadedModel, Readiness, Status
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.metrics import Metrics
from fastgen_operator.autoscale.loop import FIXED_PERIODS, Autoscaler
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.exposition import QUERY, UnusableError, _usual_values, _values, parse_sample
from fastgen_operator.autoscale.scrape.scraper import Scraped, Scraper, Target
from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.autoscale.watchlist import Subject, Watchlist
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics as OperatorMetrics
from fastgen_operator.objects.container import Container
from fastgen_operator.runtime.settings import Settings
from harness.objects import pod_with

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def exposed(model: str = "chat", names: Sequence[str] = ()) -> str:
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
    metrics.record(StepReport([], step, scheduler, StepCoefficients(0.02, 0.0005, 1e-6, 1e-8)))
    metrics.admitted([1000, 800])
    metrics.rejected(1)
    metrics.finished(FinishReason.STOP, 2.0, 500, 40)
    metrics.finished(FinishReason.ABORT, 2.0, 70, 0)
    metrics.count_rejected("invalid_value")
    body, _ = metrics.expose("text/plain", 1, names)
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
        step_model=StepCoefficients(0.02, 0.0005, 1e-6, 1e-8),
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
    # The parser would take seconds for it.
    ("90,000 labels", "fastgen_kv_cache_tokens{" + ",".join(f'a{n}="b"' for n in range(90_000)) + "} 1\n", "TooLarge"),
    ("10,000 lines", 'fastgen_kv_cache_tokens{model_name="chat"} 1\n' * 10_000, "TooLarge"),
]


@pytest.mark.parametrize(("text", "reason"), [case[1:] for case in LIES], ids=[case[0] for case in LIES])
def test_an_invalid_response_is_unusable(text: str, reason: str) -> None:
    with pytest.raises(UnusableError) as caught:
        parse_sample(text, "chat", 0.0)
    assert caught.value.reason == reason


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Yield the port of a test server."""
    server = await asyncio.start_server(handler, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def replica(port: int, pod: str = "pod", address: str = "127.0.0.1") -> Target:
    return Target(pod, address, "chat", port)


def patient(**of: Any) -> Scraper:
    """Return a scraper whose deadline a machine that stops for seconds does not reach."""
    return Scraper(60.0, deadline=60.0, **of)


async def answer_of(port: int, scraper: Scraper | None = None, **of: str) -> Sample | UnusableError:
    """Scrape one replica."""
    async with patient() if scraper is None else nullcontext(scraper) as used:
        (answer,) = (await used.scrape("fleet", [replica(port, **of)])).values()
    return answer


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
        for _ in range(5):
            began = time.monotonic()
            async with Scraper(2.0) as scraper:
                found = await scraper.scrape("fleet", [replica(bad, "bad"), replica(good, "good")])
            seconds = time.monotonic() - began
            answers = {target.pod: answer for target, answer in found.items()}
            # Try again if the machine stopped for longer than the deadline.
            if isinstance(answers["good"], Sample) and seconds < 10:
                break
    assert isinstance(answers["good"], Sample), "one bad engine spoils the others' answers"
    assert seconds < 10
    assert isinstance(answers["bad"], UnusableError)
    assert answers["bad"].reason == reason


async def test_a_closed_port_is_unreachable() -> None:
    async with serving(hang) as port:
        pass
    answer = await answer_of(port)
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

    async with serving(count) as port:
        targets = [replica(port, f"pod-{n}") for n in range(20)]
        async with patient(concurrency=4) as scraper:
            found = await scraper.scrape("fleet", targets)
    assert len(found) == 20
    assert all(isinstance(answer, Sample) for answer in found.values())
    assert most <= 4


async def test_a_fleet_does_not_wait_for_another_whose_replicas_hang() -> None:
    async with (
        serving(hang) as bad,
        serving(answering("200 OK", exposed().encode())) as good,
        patient(concurrency=8, concurrency_per_fleet=4) as scraper,
    ):
        targets = [replica(bad, f"bad-{n}") for n in range(40)]
        hanging = asyncio.create_task(scraper.scrape("bad", targets))
        answers = await scraper.scrape("good", [replica(good, f"good-{n}") for n in range(12)])
        assert not hanging.done()
        hanging.cancel()
    assert all(isinstance(answer, Sample) for answer in answers.values())
    assert len(answers) == 12


@pytest.mark.slow
async def test_fleets_with_timeouts_leave_room_for_the_others() -> None:
    async with (
        serving(hang) as bad,
        serving(answering("200 OK", exposed().encode())) as good,
        Scraper(60.0, concurrency=4, concurrency_per_fleet=4) as scraper,
    ):
        targets = [replica(bad, f"bad-{n}") for n in range(8)]
        for answer in (await scraper.scrape("bad", targets)).values():
            assert isinstance(answer, UnusableError)
        for _ in range(5):
            hanging = asyncio.create_task(scraper.scrape("bad", targets))
            await asyncio.sleep(0)
            (answer,) = (await scraper.scrape("good", [replica(good)])).values()
            is_first = not hanging.done()
            hanging.cancel()
            # Try again if the machine stopped for longer than the deadline.
            if is_first and isinstance(answer, Sample):
                break
    assert is_first
    assert isinstance(answer, Sample)


async def test_a_fleet_whose_responses_take_too_long_to_parse_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastgen_operator.autoscale.scrape.scraper._PARSING_SHARE", 1e-9)
    async with (
        serving(answering("200 OK", exposed().encode())) as port,
        patient(concurrency_per_fleet=1) as scraper,
    ):
        found = await scraper.scrape("fleet", [replica(port, f"pod-{n}") for n in range(20)])
        again = await scraper.scrape("other", [replica(port)])
    first, *others = found.values()
    assert isinstance(first, Sample)
    assert [answer.reason for answer in others if isinstance(answer, UnusableError)] == ["TimedOut"] * 19
    assert all(isinstance(answer, Sample) for answer in again.values()), "other fleets have their own time"


async def test_a_response_that_the_parser_does_not_expect_ends_only_its_own_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(text: str, model_name: str, at: float) -> Sample:
        if "recursion" in text:
            raise RecursionError("maximum recursion depth exceeded")
        return parse_sample(text, model_name, at)

    monkeypatch.setattr("fastgen_operator.autoscale.scrape.scraper.parse_sample", parse)
    async with (
        serving(answering("200 OK", b"recursion")) as bad,
        serving(answering("200 OK", exposed().encode())) as good,
        patient() as scraper,
    ):
        assert isinstance(await answer_of(bad, scraper), UnusableError)
        assert isinstance(await answer_of(good, scraper), Sample)


async def test_a_fleet_is_decided_on_while_another_is_still_scraped() -> None:
    seen: list[str] = []
    is_free = asyncio.Event()

    async def scrape(name: str, _: object) -> dict[Target, Scraped]:
        seen.append(name)
        if name == "ns/hanging":
            await is_free.wait()
        return {}

    subject = SimpleNamespace(is_autoscaled=True, pods=(), model_name="chat")
    fleets = [(("ns", "hanging"), subject), (("ns", "good"), subject)]
    watchlist: Any = SimpleNamespace(subjects=lambda: fleets, open_record=lambda *_: None, scrape_seconds=0.01)
    scraper: Any = SimpleNamespace(scrape=scrape)
    autoscaler = Autoscaler(watchlist, scraper, OperatorMetrics(), lambda _: None, partial(datetime.now, UTC))
    running = autoscaler._begin(lambda _: True)
    await running[1]
    (again,) = autoscaler._begin(lambda _: True)
    await again
    assert seen == ["ns/hanging", "ns/good", "ns/good"]
    is_free.set()
    await running[0]
    assert len(autoscaler._begin(lambda _: True)) == 2


async def test_only_ready_pods_that_are_not_being_deleted_are_scraped() -> None:
    asked: list[Target] = []

    async def scrape(_: str, targets: Iterable[Target]) -> dict[Target, Scraped]:
        asked.extend(targets)
        return {}

    pods = (
        pod_with("ready", address="10.0.0.1", ready_since=1.0),
        pod_with("leaving", address="10.0.0.2", ready_since=1.0, is_terminating=True),
        pod_with("loading", address="10.0.0.3", ready_since=None),
        pod_with("new", address=None, ready_since=None),
    )
    subject = SimpleNamespace(is_autoscaled=True, pods=pods, model_name="chat")
    fleets = [(("ns", "chat"), subject)]
    watchlist: Any = SimpleNamespace(subjects=lambda: fleets, open_record=lambda *_: None, scrape_seconds=0.01)
    scraper: Any = SimpleNamespace(scrape=scrape)
    await Autoscaler(watchlist, scraper, OperatorMetrics(), lambda _: None, partial(datetime.now, UTC)).run_once()
    assert [(target.pod, target.address) for target in asked] == [("ready", "10.0.0.1")]


def loading(stage: str, fraction: float) -> Handler:
    """Return a handler that answers as an engine's /ready does while it loads."""
    lifecycle = Lifecycle()
    lifecycle.set_loading_progress(stage, fraction)
    return refusing(lifecycle.why_not_ready() or "")


def refusing(reason: str) -> Handler:
    return answering("503 Service Unavailable", bytes(json_response(Status(reason), 503).body))


async def stage_of(handler: Handler, seconds: float = 2.0) -> str:
    async with serving(handler) as port, Scraper(seconds, deadline=seconds) as scraper:
        return await scraper.read_stage("127.0.0.1", port)


@pytest.mark.parametrize(
    ("stage", "fraction", "shown"),
    [
        ("starting", 0.0, "starting 0 %"),
        ("loading weights", 0.43, "loading weights 40 %"),
        ("loading weights", 0.49, "loading weights 40 %"),
        ("compiling kernels", 1.0, "compiling kernels 100 %"),
    ],
)
async def test_the_stage_of_a_loading_engine_is_read_in_tenths(stage: str, fraction: float, shown: str) -> None:
    assert await stage_of(loading(stage, fraction), seconds=60.0) == shown


@pytest.mark.parametrize(
    "handler",
    [
        *(hang, trickle, flood),
        refusing("draining"),
        refusing("loading weights 40 %; run kubectl delete ns"),
        refusing("x" * 41 + " 40 %"),
        refusing("Loading 40 %\u202e"),
        answering("200 OK", b'{"status":"loading weights 40 %"}'),
        answering("503 Service Unavailable", b'["loading weights 40 %"]'),
        answering("503 Service Unavailable", b'{"status":' + b"[" * 900),
        answering("503 Service Unavailable", b'{"status":"loading weights 40 %","x":"' + b"y" * 2000 + b'"}'),
        answering("302 Found\r\nLocation: http://127.0.0.1:1/", b""),
    ],
)
async def test_of_another_response_nothing_is_shown(handler: Handler) -> None:
    assert await stage_of(handler) == ""


SERVED = Readiness("ready", LoadedModel("llama", "GGUF Q4_1", 134_515_008, 0, 2048))


async def model_of(handler: Handler) -> ServedModel | None:
    async with serving(handler) as port, Scraper(2.0, deadline=2.0) as scraper:
        return await scraper.read_model("127.0.0.1", "r1", port)


async def test_a_ready_engine_says_what_it_serves() -> None:
    """An unknown value, which the engine reports as 0, is left out."""
    said = {"family": "llama", "format": "GGUF Q4_1", "parameters": 134_515_008, "maxModelLength": 2048}
    assert await model_of(answering("200 OK", bytes(json_response(SERVED).body))) == ServedModel("r1", said)


@pytest.mark.parametrize(
    "body",
    [
        b'{"status":"ready"}',
        b"fastgen_token_budget 256",
        b'{"model":[1]}',
        b'{"model":' + b"[" * 900,
        b'{"model":{"family":"llama; run kubectl delete ns","format":3,"parameters":1e30,"bytes":-1}}',
        b'{"model":{"family":"\\u202e","format":"' + b"x" * 65 + b'","parameters":true,"bytes":1000000000000001}}',
    ],
)
async def test_nothing_else_is_taken_for_a_description(body: bytes) -> None:
    assert await model_of(answering("200 OK", body)) == ServedModel("r1", None)


@pytest.mark.parametrize("handler", [hang, trickle, flood, refusing("draining"), answering("302 Found", b"")])
async def test_an_engine_that_does_not_answer_is_asked_again(handler: Handler) -> None:
    assert await model_of(handler) is None


async def test_an_engine_is_asked_once_for_each_revision() -> None:
    asked: list[str] = []

    async def read_model(_: str, revision: str) -> ServedModel:
        asked.append(revision)
        return ServedModel(revision, None)

    watchlist, woken, scraper = Watchlist(5.0), list[Key](), SimpleNamespace(read_model=read_model)
    autoscaler = Autoscaler(watchlist, scraper, OperatorMetrics(), woken.append, partial(datetime.now, UTC))  # type: ignore[arg-type]
    for revision in ("a", "a", "b", "b"):
        pod = pod_with("chat", address="10.0.0.3", revision=revision)
        policy: Any = None
        subject = Subject(uid="uid", policy=policy, model_name="chat", replicas=1, described=pod)
        watchlist.register(("ns", "chat"), subject)
        await asyncio.gather(*autoscaler._begin_reading())
    assert (asked, len(woken)) == (["a", "b"], 2)
    watchlist.forget(("ns", "chat"))
    assert watchlist.served_model(("ns", "chat"), "uid") is None


class LoadingFleet:
    """A watchlist with one fleet whose engine is loading, and a scraper that says what it does."""

    def __init__(self, **facts: Any) -> None:
        self.said = ""
        self.pod = pod_with("new", **{"address": "10.0.0.3", "engine": Container(running_since="T1"), **facts})
        self.watchlist = Watchlist(5.0)
        policy: Any = None
        subject = Subject(uid="uid", policy=policy, model_name="chat", replicas=1, loading=self.pod)
        self.watchlist.register(("ns", "chat"), subject)
        self.woken: list[Key] = []
        scraper: Any = SimpleNamespace(read_stage=self._read)
        self.autoscaler = Autoscaler(
            self.watchlist, scraper, OperatorMetrics(), self.woken.append, partial(datetime.now, UTC)
        )

    async def _read(self, address: str) -> str:
        assert address == "10.0.0.3"
        return self.said

    async def read(self, said: str) -> tuple[int, str]:
        """Return how often a status was requested, and the stage that it shows."""
        self.said, before = said, len(self.woken)
        await asyncio.gather(*self.autoscaler._begin_reading())
        stage = self.watchlist.loading_stage(("ns", "chat"))
        return len(self.woken) - before, stage.text if stage is not None and stage.is_of(self.pod) else ""


async def test_a_status_is_requested_when_the_stage_changes() -> None:
    fleet = LoadingFleet()
    assert await fleet.read("loading weights 40 %") == (1, "loading weights 40 %")
    assert await fleet.read("loading weights 40 %") == (0, "loading weights 40 %")
    assert await fleet.read("") == (0, "loading weights 40 %"), "no answer"
    assert await fleet.read("capturing graphs 0 %") == (1, "capturing graphs 0 %")


async def test_the_stage_of_an_earlier_container_is_not_shown() -> None:
    fleet = LoadingFleet()
    await fleet.read("loading weights 90 %")
    fleet.pod.__dict__["engine"] = Container(running_since="T2")
    assert await fleet.read("") == (0, "")
    assert await fleet.read("loading weights 90 %") == (1, "loading weights 90 %")


async def test_a_pod_without_an_address_is_not_asked() -> None:
    assert await LoadingFleet(address=None).read("loading weights 40 %") == (0, "")


async def test_what_a_forgotten_fleet_says_is_not_kept() -> None:
    fleet = LoadingFleet()
    reads = fleet.autoscaler._begin_reading()
    fleet.said = "loading weights 40 %"
    fleet.watchlist.forget(("ns", "chat"))
    await asyncio.gather(*reads)
    assert fleet.watchlist.loading_stage(("ns", "chat")) is None


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
    async with serving(engine) as port, patient() as scraper:
        for _ in range(6):
            answer = await answer_of(port, scraper)
            assert isinstance(answer, Sample), answer
    assert engine.connections == connections


async def test_only_the_samples_that_are_read_are_asked_for() -> None:
    engine = Keeping(1)
    async with serving(engine) as port:
        await answer_of(port)
    (path,) = engine.paths
    names = parse_qs(urlsplit(path.decode()).query)["name[]"]
    metrics = Metrics("chat")
    metrics.record(StepReport([], StepStats(), SchedulerStats(), StepCoefficients(0.02, 0.0005, 1e-6, 1e-8)))
    body, _ = metrics.expose("text/plain", 1, names)
    assert parse_sample(body.decode(), "chat", 0.0).step_model == (0.02, 0.0005, 1e-6, 1e-8)
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert len(lines) == len(names) + 4, "two phases of scheduled tokens, four coefficients"


class Scripted:
    """An engine that answers the requests of a connection with these bytes, and closes it at the request after them."""

    def __init__(self, *responses: bytes, waits: bool = True) -> None:
        self.responses, self.waits = responses, waits
        self.connections, self.open = 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for response in self.responses:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(response)
                await writer.drain()
            if self.waits:
                await reader.readuntil(b"\r\n\r\n")
        writer.close()
        self.open -= 1


BODY = exposed()
LENGTH = f"Content-Length: {len(BODY)}"


def response(*headers: str, body: str = BODY, version: str = "1.1", status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/{version} {status}", *headers, "", body)).encode()


def chunked(body: str, size: int = 700) -> str:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return "".join(f"{len(part):x}\r\n{part}\r\n" for part in (*parts, ""))


CHUNKED = "Transfer-Encoding: chunked"
FORMS = [
    ("a length", response(LENGTH), True),
    ("chunks", response(CHUNKED, body=chunked(BODY)), True),
    ("the end of the connection", response(), False),
    ("a length, and closes", response("Connection: close", LENGTH), False),
    ("HTTP/1.0", response(LENGTH, version="1.0"), False),
    ("a second response", response(LENGTH) * 2, False),
    ("an interim response", response(status="103 Early Hints", body="") + response(LENGTH), True),
]


@pytest.mark.parametrize(("answer", "is_kept"), [case[1:] for case in FORMS], ids=[case[0] for case in FORMS])
async def test_every_way_to_end_a_response_is_understood(answer: bytes, is_kept: bool) -> None:
    has_end = answer != response()
    engine = Scripted(*[answer] * (2 if has_end else 1), waits=has_end)
    async with serving(engine) as port, patient() as scraper:
        for _ in range(2):
            sample = await answer_of(port, scraper)
            assert isinstance(sample, Sample), sample
    assert engine.connections == (1 if is_kept else 2)


async def test_a_response_in_many_pieces_is_put_together() -> None:
    async def send_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        whole = response(LENGTH)
        for at in (*range(0, 60, 3), *range(60, len(whole), 1000)):
            writer.write(whole[at : at + (3 if at < 60 else 1000)])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(send_slowly) as port:
        answer = await answer_of(port)
    assert isinstance(answer, Sample), answer


BROKEN = [
    ("less than its length", response("Content-Length: 99999"), "Unreachable"),
    ("no last chunk", response(CHUNKED, body=chunked(BODY)[:-5]), "Unreachable"),
    ("no size of a chunk", response(CHUNKED, body="size\r\n"), "Unreachable"),
    ("half a head", b"HTTP/1.1 200 OK\r\nContent-", "Unreachable"),
    ("no bytes", b"", "Unreachable"),
    ("a head without end", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000, "Unreachable"),
    ("a huge body", response("Content-Length: 2000000", body="fastgen_x 1\n" * 160_000), "TooLarge"),
    ("a compressed body", response("Content-Encoding: gzip", "Content-Length: 1", body="\x1f"), "NotMetrics"),
]


@pytest.mark.parametrize(("answer", "reason"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
async def test_a_broken_response_is_unusable_and_its_connection_is_closed(answer: bytes, reason: str) -> None:
    engine = Scripted(answer, waits=False)
    async with serving(engine) as port, patient() as scraper:
        unusable = await answer_of(port, scraper)
        assert isinstance(unusable, UnusableError)
        assert unusable.reason == reason
        engine.responses = (response(LENGTH),)
        assert isinstance(await answer_of(port, scraper), Sample)
    assert engine.connections <= 3, "a request that got no response is sent once more"


async def test_a_scrape_is_not_lost_when_the_engine_closes_the_connection_at_its_request() -> None:
    engine = Scripted(response(LENGTH))
    async with serving(engine) as port, patient() as scraper:
        for _ in range(3):
            answer = await answer_of(port, scraper)
            assert isinstance(answer, Sample), answer
    assert engine.connections == 3


async def test_leaving_the_context_ends_a_running_scrape() -> None:
    async with serving(hang) as port:
        async with patient(concurrency=1) as scraper:
            running = asyncio.create_task(scraper.scrape("fleet", [replica(port, f"p{n}") for n in range(50)]))
            await asyncio.sleep(0.01)
        answers = await asyncio.wait_for(running, 60)
    assert [type(answer) for answer in answers.values()] == [UnusableError] * 50


async def test_pods_are_reached_at_ipv6_addresses_and_never_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    hosts = []

    async def remember(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[1])
        writer.write(response(LENGTH))

    async with serving(remember, "::1") as port:
        answer = await answer_of(port, address="::1")
        assert isinstance(answer, Sample), answer
    assert hosts == [f"Host: [::1]:{port}".encode()]


async def test_connections_are_kept_for_so_many_replicas_and_closed_when_unused() -> None:
    engine = Scripted(*[response(LENGTH)] * 9)
    async with serving(engine) as port:
        async with patient(keep=3, keep_seconds=0.1) as scraper:
            await scraper.scrape("small", [replica(port, f"pod-{number}") for number in range(3)])
            await until(lambda: 0 < engine.open <= 3)
            await scraper.scrape("large", [replica(port, f"pod-{number}") for number in range(7)])
            await until(lambda: engine.open <= 3)
            await until(lambda: engine.open == 0)
            await scraper.scrape("small", [replica(port)])
            await until(lambda: engine.open == 1)
        await until(lambda: engine.open == 0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the other side of connections in the same loop."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_connections_outlive_the_interval_of_fleets_of_a_fixed_size() -> None:
    assert FIXED_PERIODS * Settings(engine_image="engine").scrape_seconds < KEEP_ALIVE_SECONDS


@pytest.mark.parametrize("names", [(), parse_qs(QUERY)["name[]"]], ids=["all samples", "those asked for"])
def test_the_fast_parser_returns_what_the_library_returns(names: Sequence[str]) -> None:
    text = exposed(names=names)
    assert _usual_values(text, "chat") == _values(text, "chat")


def test_engines_without_the_cost_of_contexts_are_read_as_if_it_were_0() -> None:
    old = "".join(line for line in exposed().splitlines(keepends=True) if "context_pair" not in line)
    assert len(old) < len(exposed())
    assert _usual_values(old, "chat") == _values(old, "chat"), "as fast as other engines"
    costs = parse_sample(exposed(), "chat", 0.0).step_model
    assert costs.context_pair == 1e-8
    assert parse_sample(old, "chat", 0.0).step_model == costs._replace(context_pair=0.0)


def test_a_number_near_zero_is_zero() -> None:
    text = exposed()
    line = next(line for line in text.split("\n") if line.startswith('fastgen_step_model{coefficient="base"'))
    found = parse_sample(text.replace(line, f"{line.rpartition(' ')[0]} 5e-324"), "chat", 0.0)
    assert found.step_model == parse_sample(text, "chat", 0.0).step_model._replace(base=0.0)


def test_lines_that_another_program_wrote_are_parsed_by_the_library() -> None:
    other = exposed().replace('{coefficient="token",model_name="chat"}', '{ model_name="chat", coefficient="token" }')
    assert _usual_values(other, "chat") is None
    assert parse_sample(other, "chat", 0.0) == parse_sample(exposed(), "chat", 0.0)
    assert parse_sample(exposed('a "b"'), 'a "b"', 0.0) == parse_sample(exposed(), "chat", 0.0)
