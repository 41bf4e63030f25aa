"""Parts of a body that are written straight to a connection, without ASGI's `send`."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from engine.server.scripted_prompts import prompt_for
from engine.server.serving import Serving
from fastgen.server.http import connection
from fastgen.server.http.connection import BodyWriter, Connection, body_writer, connection_class
from support.waiting import HANG_SECONDS


class Transport:
    """Records what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.num_unread = 0
        self.is_aborted = False
        self._is_closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, _name: str, default: object = None) -> object:
        return default


POST = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n"


class Served:
    """A connection whose requests are answered by the test.

    Those with the same `config` and `state` belong to one server.
    """

    def __init__(
        self, sent: bytes = POST, config: uvicorn.Config | None = None, state: ServerState | None = None
    ) -> None:
        async def app(scope: Scope, _receive: Receive, send: Send) -> None:
            self.opened = body_writer(scope), send
            self.requests.put_nowait(self.opened)
            await self.end.wait()

        self.requests: asyncio.Queue[tuple[BodyWriter, Send]] = asyncio.Queue()
        self.end = asyncio.Event()
        self.transport = Transport()
        if config is None:
            config = uvicorn.Config(cast(Any, app), http=connection_class(60.0), log_config=None, lifespan="off")
            config.load()
        self.config, self.state = config, state or ServerState()
        protocol = cast(Any, config.http_protocol_class)
        self.connection: Connection = protocol(config=config, server_state=self.state, app_state={})
        self.connection.connection_made(cast(Any, self.transport))
        self.connection.data_received(sent)


async def test_parts_of_a_body_are_chunks_between_the_head_and_the_end() -> None:
    served = Served()
    writer, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.write(b"one")
    writer.write(b"")
    writer.write(b"sixteen bytes ..")
    await send({"type": "http.response.body", "body": b"end", "more_body": False})
    _, _, body = served.transport.written.partition(b"transfer-encoding: chunked\r\n\r\n")
    assert body == b"3\r\none\r\n10\r\nsixteen bytes ..\r\n3\r\nend\r\n0\r\n\r\n", "an empty part would end the body"
    served.end.set()


async def test_a_client_that_does_not_read_blocks_the_writer() -> None:
    served, calls = Served(), list[None]()
    writer, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.on_writable(lambda: calls.append(None))
    assert not writer.is_blocked
    served.connection.pause_writing()
    assert writer.is_blocked
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 0)
    served.connection.resume_writing()
    assert (writer.is_blocked, len(calls)) == (False, 1)
    await writer.drain()
    writer.on_writable(None)
    served.connection.pause_writing()
    served.connection.resume_writing()
    assert len(calls) == 1
    served.end.set()


def stalled(served: Served) -> bool:
    """Let the time pass in which a client must read something; return whether it was disconnected."""
    timer = served.connection._write_timer
    assert timer is not None
    timer._run()  # type: ignore[attr-defined]
    return served.transport.is_aborted


async def test_a_client_that_reads_nothing_of_a_stream_is_disconnected_and_one_that_reads_slowly_is_not() -> None:
    served = Served()
    _, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    served.transport.num_unread = 70_000
    served.connection.pause_writing()
    served.transport.num_unread = 69_999
    assert not stalled(served), "it has read a byte"
    assert stalled(served)
    served.end.set()


async def test_a_client_is_not_disconnected_if_it_reads_while_more_is_written() -> None:
    served = Served()
    _, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    served.transport.num_unread = 70_000
    served.connection.pause_writing()
    served.connection.resume_writing()
    served.transport.num_unread = 80_000
    assert not stalled(served), "it reads: the writer is not blocked"
    served.end.set()


@pytest.mark.parametrize("close", [True, False], ids=["closing", "kept"])
async def test_a_client_that_does_not_read_the_rest_of_a_response_is_disconnected(close: bool) -> None:
    served = Served()
    _, send = await served.requests.get()
    headers = [(b"content-length", b"3"), *([(b"connection", b"close")] if close else [])]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    served.transport.num_unread = 3
    await send({"type": "http.response.body", "body": b"one", "more_body": False})
    assert stalled(served)
    served.end.set()


async def test_a_client_that_does_not_read_its_error_is_disconnected() -> None:
    served = Served(b"")
    served.transport.num_unread = 3
    served.connection.data_received(b"no HTTP\r\n\r\n")
    assert served.transport.is_closing()
    assert stalled(served)


async def test_nothing_is_written_after_a_disconnect() -> None:
    served = Served()
    writer, send = await served.requests.get()
    served.connection.connection_lost(None)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.write(b"one")
    await writer.drain()
    assert served.transport.written == b""
    served.end.set()


async def test_an_http_1_0_client_gets_a_body_that_ends_with_the_connection() -> None:
    served = Served(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n")
    writer, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.write(b"one")
    await send({"type": "http.response.body", "body": b"two", "more_body": True})
    await send({"type": "http.response.body", "body": b"end", "more_body": False})
    head, _, body = served.transport.written.partition(b"\r\n\r\n")
    assert body == b"onetwoend"
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert served.transport.is_closing()
    served.end.set()


async def test_an_http_1_0_client_gets_a_length_if_it_is_known() -> None:
    served = Served(b"GET / HTTP/1.0\r\nExpect: 100-continue\r\n\r\n")
    _, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"one", "more_body": False})
    head, _, body = served.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), "HTTP/1.0 knows no 100 Continue"
    assert (body, b"content-length: 3" in head, served.transport.is_closing()) == (b"one", True, True)
    served.end.set()


async def test_an_offer_of_another_protocol_by_http_1_0_is_ignored() -> None:
    head = b"POST / HTTP/1.0\r\nConnection: close, upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\n"
    served = Served(head + b"hello")
    writer, _ = await served.requests.get()
    assert (bytes(writer._cycle.body), writer._cycle.keep_alive) == (b"hello", False)
    served.end.set()


async def test_a_tunnel_is_rejected_and_its_bytes_are_no_request() -> None:
    served = Served(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert served.transport.written.startswith(b"HTTP/1.1 405")
    assert served.transport.is_closing()
    await asyncio.sleep(0)
    assert served.requests.empty()


def chunked(*pieces: bytes) -> bytes:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "a WebSocket": b"Upgrade: websocket\r\nConnection: keep-alive, UPGRADE\r\nSec-WebSocket-Key: AAAA\r\n",
    "TLS": b"connection: upgrade\r\nconnection: Upgrade\r\nUpgrade: TLS/1.3\r\nUpgrade: h2c\r\n",
    "the last header": b"Upgrade: foo\r\nConnection: upgrade\r\n",
    "an expectation": b"Expect: 100-continue\r\nUpgrade: h2c\r\nConnection: upgrade\r\n",
}
BODIES = {
    "a length": (b"Content-Length: 5\r\n", b"hello"),
    "chunks": (b"Transfer-Encoding: chunked\r\n", b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\nTrailer: a\r\n\r\n"),
}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
async def test_an_offer_of_another_protocol_is_ignored(upgrade: bytes, body: tuple[bytes, bytes], size: int) -> None:
    """RFC 9110, 7.8."""
    sent = b"".join(b"POST /%d HTTP/1.1\r\nHost: a\r\n%b%b\r\n%b" % (n, upgrade, *body) for n in range(2))
    served = Served(b"")
    for start in range(0, len(sent), size):
        served.connection.data_received(sent[start : start + size])
    first, _ = await served.requests.get()
    cycles = (first._cycle, served.connection.cycle)
    assert [(cycle.scope["path"], bytes(cycle.body), cycle.more_body) for cycle in cycles] == [
        ("/0", b"hello", False),
        ("/1", b"hello", False),
    ]
    for cycle in cycles:
        assert cycle.keep_alive
        assert b"upgrade" not in dict(cycle.scope["headers"])
    assert not served.transport.is_closing()
    served.end.set()


@pytest.mark.parametrize(
    "endless",
    [b"a: b\r\n" * 100, b"a" * 1000],
    ids=["headers after the body", "a header after the body"],
)
async def test_what_follows_a_body_is_limited(endless: bytes) -> None:
    served = Served(chunked(b"{}") + b"0\r\n")
    await served.requests.get()
    for _ in range(1000):
        served.connection.data_received(endless)
    assert served.transport.written.startswith(b"HTTP/1.1 431")
    assert served.transport.is_closing()
    assert len(served.connection.headers) == 2, "they are not kept"
    served.end.set()


async def test_an_endless_extension_of_a_chunk_is_rejected() -> None:
    served = Served(chunked() + b"1;")
    await served.requests.get()
    for _ in range(100):
        served.connection.data_received(b"a" * 1000)
    assert served.transport.written.startswith(b"HTTP/1.1 431")
    served.end.set()


async def test_a_body_in_tiny_chunks_is_received() -> None:
    served = Served(chunked(*[b"a"] * 50_000) + b"0\r\nA: b\r\n\r\n")
    await served.requests.get()
    assert bytes(served.connection.cycle.body) == b"a" * 50_000
    assert not served.connection.cycle.more_body
    served.end.set()


@pytest.mark.parametrize("upgrade", [b"", b"Upgrade: h2c\r\nConnection: upgrade\r\n"], ids=["", "upgrade"])
@pytest.mark.parametrize("name", [b"Host", b"AUTHORIZATION", b"content-type"])
async def test_a_header_by_which_requests_are_admitted_occurs_once(name: bytes, upgrade: bytes) -> None:
    """A proxy that read the other one would admit another request than the server serves."""
    served = Served(b"POST / HTTP/1.1\r\nA: b\r\n" + upgrade + name + b": a\r\nA: c\r\n" + name + b": b\r\n\r\n")
    assert served.transport.written.startswith(b"HTTP/1.1 400")
    assert b"the header %b more than once" % name.lower() in served.transport.written
    assert served.transport.is_closing()
    assert served.requests.empty()
    served.end.set()


async def test_the_number_of_headers_is_limited() -> None:
    served = Served(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 300 + b"\r\n")
    assert served.transport.written.startswith(b"HTTP/1.1 431")
    assert b"more than 256 headers" in served.transport.written
    served.end.set()


async def test_requests_that_wait_for_earlier_responses_are_limited() -> None:
    served = Served(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 60)
    assert len(served.connection.pipeline) == 59
    served.connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 10_000)
    assert served.transport.is_closing()
    assert len(served.connection.pipeline) <= 64
    assert served.transport.written == b"", "an error would be taken for the first response"
    served.end.set()


async def test_the_connection_that_waits_longest_is_closed_if_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_MOST_CONNECTIONS", 3)
    busy = Served()
    await busy.requests.get()
    idle = [Served(b"", busy.config, busy.state) for _ in range(2)]
    assert not any(other.transport.is_closing() for other in idle)
    half = Served(b"GET / HTTP/1.1\r\nHost:", busy.config, busy.state)
    assert [other.transport.is_closing() for other in (busy, *idle, half)] == [False, True, False, False]
    idle[0].connection.connection_lost(None)
    _, send = busy.opened
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    assert list(busy.connection.waiting) == [idle[1].connection, half.connection, busy.connection]
    busy.end.set()


def test_a_stream_to_an_http_1_0_client_is_not_chunked(scripted: Serving) -> None:
    body = json.dumps({"prompt": prompt_for("one two three"), "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", scripted.port), timeout=HANG_SECONDS) as client:
        client.sendall(head.encode() + body)
        with client.makefile("rb") as answer:  # until the server closes
            received = answer.read()
    fields, _, events = received.partition(b"\r\n\r\n")
    assert b"chunked" not in fields
    lines = [line for line in events.decode().split("\n") if line]
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == "one two three"
    assert lines[-1] == "data: [DONE]"


def test_a_post_that_offers_http_2_is_answered_as_http_1_1(scripted: Serving) -> None:
    """As `curl --http2` and Java's HttpClient send it."""
    body = {"prompt": prompt_for("one two three")}
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    for _ in range(2):
        response = scripted.request("POST", "/v1/completions", json=body, headers=offer)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == "one two three"
