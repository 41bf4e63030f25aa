"""Polls of the gateway's pods: what is believed, what is bounded, and how fast a held request is seen.

The pods are stand-ins: small servers of this file.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import unquote

import pytest

from fastgen_operator.autoscale.loop import Autoscaler
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.sample import Traffic
from fastgen_operator.autoscale.scrape import gateways
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.gateways import (
    ANSWER_SECONDS,
    LIMIT_BYTES,
    LIST_TRUST_SECONDS,
    Gateways,
    parse_answer,
)
from fastgen_operator.autoscale.scrape.scraper import Scraper
from fastgen_operator.autoscale.watchlist import Subject, Watchlist
from fastgen_operator.kinds import Key
from fastgen_operator.metrics import Metrics

CHAT: Key = ("team", "chat")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def demand(held: Any = 0, idle: Any = 700.0, started: Any = 5000.0, name: str = "team/chat") -> Any:
    """Return an answer about one deployment."""
    waiting = {"held": held, "heldTokens": 0, "oldestHeldSeconds": 0.0, "idleSeconds": idle}
    return {"startedSeconds": started, "deployments": {name: waiting}}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


UNUSABLE = [
    ("not JSON", b"<html>welcome</html>"),
    ("nothing", b""),
    ("a list", b"[]"),
    ("no age", body({"deployments": {}})),
    ("no deployments", body({"startedSeconds": 1.0})),
    ("deployments in a list", body({"startedSeconds": 1.0, "deployments": []})),
    ("a negative age", body(demand(started=-1.0))),
    ("an infinite age", body(demand(started=math.inf))),
    ("an age that is no number", body(demand(started=math.nan))),
    ("an age in words", body(demand(started="long"))),
    ("a huge age", body(demand(started=10**400))),
    ("an age of 10,000 digits", b'{"startedSeconds": 1' + b"0" * 10_000 + b', "deployments": {}}'),
    ("a negative number of requests", body(demand(held=-1))),
    ("half a request", body(demand(held=0.5))),
    ("true requests", body(demand(held=True))),
    ("a negative idle time", body(demand(idle=-0.1))),
    ("an idle time that is no number", body(demand(idle=math.nan))),
    ("a name without a namespace", body(demand(name="chat"))),
    ("a name of three parts", body(demand(name="a/b/c"))),
    ("no counts", body({"startedSeconds": 1.0, "deployments": {"team/chat": {}}})),
    ("a next page behind no name", body({**demand(), "next": "chat"})),
    ("a next page behind a number", body({**demand(), "next": 7})),
    ("deep nesting", b"[" * 200_000),
]


@pytest.mark.parametrize("text", [case[1] for case in UNUSABLE], ids=[case[0] for case in UNUSABLE])
def test_an_answer_that_is_not_as_agreed_is_unusable(text: bytes) -> None:
    with pytest.raises(UnusableError) as caught:
        parse_answer(text, 0.0)
    assert caught.value.reason == "NotDemand"
    assert len(str(caught.value)) < 400


def answering(value: Any, status: str = "200 OK") -> Handler:
    """Return a stand-in that gives one answer to each request."""
    text = value if isinstance(value, bytes) else body(value)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)
        await writer.drain()
        writer.close()

    return answer


async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    with suppress(ConnectionError):
        while True:
            writer.write(b"[1," * 100_000)
            await writer.drain()


@asynccontextmanager
async def gateway(pods: Mapping[str, Handler], scraper: Scraper) -> AsyncIterator[tuple[Gateways, list[str]]]:
    """Yield the gateway with a stand-in for each pod, each at its own address, and the reasons of failed polls."""
    async with AsyncExitStack() as servers:
        addresses, port = {}, 0
        for number, (name, handler) in enumerate(pods.items()):
            addresses[name] = f"127.0.0.{number + 1}"
            server = await asyncio.start_server(handler, addresses[name], port)
            port = server.sockets[0].getsockname()[1]
            servers.callback(server.close)
        failures: list[str] = []
        found = Gateways(lambda: addresses, scraper, failures.append, port)
        servers.callback(found.close)
        yield found, failures


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


async def traffic_of(pods: Mapping[str, Handler], failing: int = 0, seconds: float = 60.0) -> tuple[Traffic, list[str]]:
    """Return what the pods say once each has answered, or so many have failed; and the failures.

    Args:
        seconds: in which a pod must answer.
    """
    async with Scraper(seconds, deadline=seconds) as scraper, gateway(pods, scraper) as (found, failures):

        def have_answered() -> bool:
            found.begin(lambda _: None)
            num_answers = sum(pod.answer is not None for pod in found._pods.values())
            return len(failures) >= failing and num_answers == len(pods) - failing

        await until(have_answered)
        return found.traffic(CHAT, asyncio.get_running_loop().time()), failures


async def test_held_requests_add_up_and_the_last_request_at_any_pod_counts() -> None:
    found, failures = await traffic_of({"a": answering(demand(2, 90.0)), "b": answering(demand(1, 700.0))})
    assert (found, failures) == (Traffic(3, 90.0), [])
    # A pod that has had no request since it started vouches for the time since then.
    found, _ = await traffic_of({"a": answering(demand(0, None, started=30.0)), "b": answering(demand(0, 700.0))})
    assert found == Traffic(0, 30.0)


def paging(pages: Callable[[str], Any]) -> Handler:
    """Return a stand-in that answers a request for the page behind a name; the first page is behind no name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        after = unquote(target.partition("?after=")[2])
        text = body(pages(after))
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)
        await writer.drain()
        writer.close()

    return answer


def page_of(names: list[str], started: float = 5000.0, **more: Any) -> Any:
    waiting = {"held": 1, "idleSeconds": None}
    return {"startedSeconds": started, "deployments": dict.fromkeys(names, waiting), **more}


async def test_all_pages_of_an_answer_are_read() -> None:
    """The pod was restarted between them, so it knows less than its first page says."""

    def pages(after: str) -> Any:
        return {
            "": page_of(["team/a", "team/b"], next="team/b"),
            "team/b": page_of(["team/c", "team/c-0"], started=20.0, next="team/c-0"),
            "team/c-0": page_of(["team/chat"], started=21.0),
        }[after]

    found, failures = await traffic_of({"a": paging(pages)})
    assert (found, failures) == (Traffic(1, 20.0), [])


async def test_an_answer_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read counts, and what was not is unknown."""
    monkeypatch.setattr(gateways, "MOST_DEPLOYMENTS", 7)
    asked: list[str] = []

    def pages(after: str) -> Any:
        asked.append(after)
        names = [f"team/a{len(asked):03d}{end}" for end in "xy"]
        return page_of(["team/chat", *names] if not after else names, next=names[-1])

    found, failures = await traffic_of({"a": paging(pages)})
    assert (found, failures) == (Traffic(1, 5000.0), [])
    assert len(asked) % 3 == 0, "three pages have seven deployments"

    found, failures = await traffic_of({"a": paging(lambda _: page_of(["team/chat"], next="team/chat"))}, failing=1)
    assert found == Traffic(0, None, "pod a of the gateway does not answer")
    assert set(failures) == {"NotDemand"}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (hang, "TimedOut"),
        (flood, "TooLarge"),
        (answering(b"x" * (LIMIT_BYTES + 1)), "TooLarge"),
        (answering("no"), "NotDemand"),
        (answering(demand(), "500 Internal Server Error"), "BadStatus"),
        (answering(b"", "302 Found\r\nLocation: http://127.0.0.1:1/"), "BadStatus"),
    ],
)
async def test_a_pod_without_a_usable_answer_hides_the_idleness_and_no_held_request(
    other: Handler, reason: str
) -> None:
    pods = {"a": answering(demand(2)), "b": other}
    found, failures = await traffic_of(pods, failing=1, seconds=0.5 if other is hang else 60.0)
    assert found == Traffic(2, None, "pod b of the gateway does not answer")
    assert set(failures) == {reason}


async def test_no_pod_and_a_pod_that_does_not_know_the_deployment_are_no_evidence() -> None:
    async with Scraper(0.5) as scraper, gateway({}, scraper) as (found, _):
        found.begin(lambda _: None)
        await until(lambda: found._listed_at > 0)
        now = asyncio.get_running_loop().time()
        assert found.traffic(CHAT, now) == Traffic(0, None, "the gateway has no pod")
    other, _ = await traffic_of({"a": answering(demand(name="team/other"))})
    assert other == Traffic(0, None, "pod a of the gateway does not route to this FastGenDeployment")


async def test_old_answers_and_lists_are_no_evidence() -> None:
    def list_pods() -> Mapping[str, str]:
        if lists:
            raise OSError("no API server")
        lists.append(1)
        return {"a": "127.0.0.1"}

    lists: list[int] = []
    async with Scraper(60.0, deadline=60.0) as scraper, gateway({"a": answering(demand(1))}, scraper) as (served, _):
        failures: list[str] = []
        found = Gateways(list_pods, scraper, failures.append, served.port)

        def traffic() -> Traffic:
            found.begin(lambda _: None)
            return found.traffic(CHAT, asyncio.get_running_loop().time())

        await until(lambda: traffic() == Traffic(1, 700.0))
        now = asyncio.get_running_loop().time()
        late = found.traffic(CHAT, now + ANSWER_SECONDS + 1)
        assert late == Traffic(0, None, "pod a of the gateway does not answer")
        later = found.traffic(CHAT, now + LIST_TRUST_SECONDS + 1)
        assert later.idle_seconds is None
        assert later.fault.startswith("the pods of the gateway cannot be listed")
        found.close()


def woken(watchlist: Watchlist, gateways: Gateways, scraper: Scraper, keys: list[Key]) -> Autoscaler:
    return Autoscaler(watchlist, scraper, Metrics(), keys.append, partial(datetime.now, UTC), gateways)


def sleeping(**changes: Any) -> Subject:
    of: dict[str, Any] = {"uid": "u", "policy": Policy(min_replicas=0, max_replicas=3), "model_name": "chat"}
    return Subject(**{**of, "replicas": 0, **changes})


async def test_a_held_request_is_decided_on_within_a_second_however_seldom_engines_are_scraped() -> None:
    answer, num_polls = demand(0), 0

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_polls
        num_polls += 1
        await answering(answer)(reader, writer)

    async with Scraper(60.0, deadline=60.0) as scraper, gateway({"a": say, "b": hang}, scraper) as (found, _):
        watchlist, keys = Watchlist(60.0), list[Key]()
        watchlist.register(CHAT, sleeping())
        running = asyncio.create_task(woken(watchlist, found, scraper, keys).run())
        await until(lambda: num_polls >= 3)
        record = watchlist.lookup(CHAT, "u")
        assert record is None or record.decision is None or record.decision.replicas == 0
        keys.clear()
        answer, before = demand(4), num_polls
        await until(lambda: CHAT in keys)
        assert num_polls <= before + 3, "the first answer decides, half a second later; one may have been on its way"
        record = watchlist.lookup(CHAT, "u")
        assert record is not None
        assert record.decision is not None
        assert record.decision.replicas == 1
        running.cancel()


async def test_the_gateway_is_asked_only_while_a_fleet_may_have_no_replica() -> None:
    lists = 0

    def list_pods() -> Mapping[str, str]:
        nonlocal lists
        lists += 1
        return {}

    async with Scraper(60.0) as scraper:
        watchlist, keys = Watchlist(60.0), list[Key]()
        watchlist.register(CHAT, sleeping(policy=Policy(min_replicas=1, max_replicas=3)))
        autoscaler = woken(watchlist, Gateways(list_pods, scraper, lambda _: None), scraper, keys)
        for _ in range(5):
            autoscaler._ask_gateways()
            await asyncio.sleep(0.02)
        assert lists == 0
        watchlist.register(CHAT, sleeping())
        autoscaler._ask_gateways()
        await until(lambda: lists == 1)


async def test_a_gateway_cannot_wake_what_it_does_not_hold_for() -> None:
    """Fleets with a lower bound, of other modes, or with replicas are not decided on because of an answer."""
    async with Scraper(60.0) as scraper:
        watchlist, keys = Watchlist(60.0), list[Key]()
        watchlist.register(("team", "bound"), sleeping(policy=Policy(min_replicas=1, max_replicas=3)))
        watchlist.register(("team", "fixed"), sleeping(is_autoscaled=False))
        watchlist.register(("team", "runs"), sleeping(replicas=1))
        autoscaler = woken(watchlist, Gateways(dict, scraper, lambda _: None), scraper, keys)
        names = ("bound", "fixed", "runs", "absent")
        waiting = {f"team/{name}": {"held": 9, "idleSeconds": 0} for name in names}
        autoscaler._wake_fleets(parse_answer(body({"startedSeconds": 1, "deployments": waiting}), 0.0))
        await asyncio.sleep(0.05)
        assert keys == []
